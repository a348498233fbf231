"""What a tensor of a program is, as an expression over the inputs of the step: exact, over the reals.

A `Term` is a tensor that some function makes of others. What is known of the function is in `head`;
two terms of the same head and operands are one object, so that equality is identity. Where values
only add up and are scaled, that is done: a `Sum` is a linear combination of elements of terms, with
rational coefficients. A `Value` is a tensor as pieces of such sums, in the order of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

UNIFORM = -1
"""The start of a term that has one element, which stands for every element."""


class Addend(NamedTuple):
    """c t[start:]: the elements of a term from one on, times a number."""

    term: Term
    start: int
    by: Fraction


Sum = tuple[Addend, ...]
"""Addends, each (term, start) once, none with 0, in the order of the terms. (): zero."""


class Piece(NamedTuple):
    """So many elements in a row, which are those of a sum."""

    numel: int
    sum: Sum


class Value(NamedTuple):
    """A tensor of each rank, in the order of its elements.

    spread: rank r has the r-th of W equal parts of what the pieces say, of this shape each; else
    the pieces are what each rank has, where a term may be another one on each rank (`varies`).
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    spread: bool = False

    @property
    def numel(self) -> int:
        """Elements on one rank."""
        return numel_of(self.shape)

    @property
    def varies(self) -> bool:
        """Whether ranks have other values."""
        return self.spread or any(one.term.varies for piece in self.pieces for one in piece.sum)

    @property
    def uniform(self) -> Sum | None:
        """The sum that every element is, or None."""
        sums = {piece.sum for piece in self.pieces}
        one = sums.pop() if len(sums) == 1 else None
        return one if one is not None and all(x.start == UNIFORM for x in one) else None


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A tensor that a function makes of its operands. `Terms` makes them, each once.

    varies: whether it is of one rank: of its batch, its shard, its random numbers.
    """

    head: Hashable
    operands: tuple[Value, ...]
    numel: int
    varies: bool
    number: int

    def __repr__(self) -> str:
        return text_of_term(self)


class Terms:
    """All terms of a proof, by what they are."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Term] = {}

    def term(
        self,
        head: Hashable,
        operands: Iterable[Value] = (),
        *,
        numel: int = 1,
        varies: bool | None = None,
    ) -> Term:
        """Return the term of a head and operands; by default it varies if one of these does."""
        given = tuple(operands)
        key = head, given, numel
        found = self._made.get(key)
        if found is None:
            differs = any(one.varies for one in given) if varies is None else varies
            found = Term(head, given, numel, differs, len(self._made))
            self._made[key] = found
        return found

    def number(self, number: Fraction) -> Sum:
        """Return the sum that every element of a constant tensor is."""
        return scaled(whole(self.term("one")), number)


def numel_of(shape: Sequence[int]) -> int:
    """Return how many elements a shape has."""
    numel = 1
    for size in shape:
        numel *= size
    return numel


def exact(number: float) -> Fraction:
    """Return the number that a float stands for: the simplest quotient that rounds to it.

    Example:
        >>> exact(0.1), exact(2 / 3), exact(3)
        (Fraction(1, 10), Fraction(2, 3), Fraction(3, 1))
    """
    simple = Fraction(number).limit_denominator(10**6)
    return simple if float(simple) == number else Fraction(number)


def whole(term: Term) -> Sum:
    """Return the elements of a term."""
    return (Addend(term, UNIFORM if term.numel == 1 else 0, Fraction(1)),)


def of_term(term: Term, shape: tuple[int, ...]) -> Value:
    """Return a term as a value."""
    return Value(shape, joined([Piece(term.numel, whole(term))]))


def scaled(one: Sum, by: Fraction) -> Sum:
    """Return a sum times a number."""
    if by == 1:
        return one
    return tuple(Addend(x.term, x.start, x.by * by) for x in one) if by else ()


def added(a: Sum, b: Sum) -> Sum:
    """Return a + b."""
    if not (a and b):
        return a or b
    found: dict[tuple[Term, int], Fraction] = {(x.term, x.start): x.by for x in a}
    for term, start, by in b:
        found[term, start] = found.get((term, start), Fraction(0)) + by
    rest = [Addend(term, start, by) for (term, start), by in found.items() if by]
    return tuple(sorted(rest, key=lambda x: (x.term.number, x.start)))


def moved(one: Sum, by: int) -> Sum:
    """Return the sum `by` elements further on."""
    if not by:
        return one
    return tuple(x if x.start == UNIFORM else x._replace(start=x.start + by) for x in one)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return pieces without empty ones, and those as one that go on with each other."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.numel and moved(found[-1].sum, found[-1].numel) == piece.sum:
            found[-1] = Piece(found[-1].numel + piece.numel, found[-1].sum)
        elif piece.numel:
            found.append(piece)
    return tuple(found)


def cut(pieces: Iterable[Piece], start: int, numel: int) -> tuple[Piece, ...]:
    """Return `numel` elements from `start` on."""
    found, at = [], 0
    for piece in pieces:
        first, last = max(at, start), min(at + piece.numel, start + numel)
        if first < last:
            found.append(Piece(last - first, moved(piece.sum, first - at)))
        at += piece.numel
    return tuple(found)


def part_of(value: Value, start: int, numel: int, world: int) -> tuple[Piece, ...]:
    """Return elements of a value, of each rank in its order where it is spread."""
    if numel == value.numel:
        return value.pieces
    if not value.spread:
        return cut(value.pieces, start, numel)
    each = (cut(value.pieces, r * value.numel + start, numel) for r in range(world))
    return joined(piece for some in each for piece in some)


def aligned(every: Sequence[Sequence[Piece]]) -> Iterator[tuple[int, list[Sum]]]:
    """Return (numel, the sum of each) where several rows of pieces of one length change."""
    places: set[int] = set()
    for pieces in every:
        at = 0
        for piece in pieces:
            at += piece.numel
            places.add(at)
    rest, at = [list(reversed(pieces)) for pieces in every], 0
    for place in sorted(places):
        numel, sums = place - at, []
        for row in rest:
            first = row.pop()
            sums.append(first.sum)
            if first.numel > numel:
                row.append(Piece(first.numel - numel, moved(first.sum, numel)))
        yield numel, sums
        at = place


def mapped(value: Value, fn: Callable[[Sum], Sum]) -> Value:
    """Return the value with fn(sum) in the place of each sum."""
    made = joined(Piece(piece.numel, fn(piece.sum)) for piece in value.pieces)
    return value._replace(pieces=made)


def text_of_term(term: Term, depth: int = 3) -> str:
    """Return a short text: "sum over ranks(mm(args[0], weight))"."""
    words = [word for word in _words(term.head) if word]
    if not term.operands:
        return " ".join(words) or "?"
    inner = ", ".join(text_of(one, depth - 1) for one in term.operands) if depth else "..."
    return f"{words[0]}({inner})"


def text_of(value: Value, depth: int = 3) -> str:
    """Return a short text of a value: at most three of its pieces."""
    shown = [text_of_sum(piece.sum, depth) for piece in value.pieces[:3]]
    rest = f", {len(value.pieces) - 3} more" if len(value.pieces) > 3 else ""
    text = f"[{', '.join(shown)}{rest}]" if len(value.pieces) > 1 else "".join(shown)
    return f"the rank's part of {text}" if value.spread else text


def text_of_sum(one: Sum, depth: int = 3) -> str:
    """Return a short text of a sum: "1/2 sum over ranks(...)"."""
    if not one:
        return "0"
    return " + ".join(_addend(x, depth) for x in one[:3]) + (" + ..." if len(one) > 3 else "")


def _addend(one: Addend, depth: int) -> str:
    part = f"[{one.start}:]" if one.start > 0 else ""
    name = text_of_term(one.term, depth)
    if name == "one":
        return str(one.by)
    return f"{name}{part}" if one.by == 1 else f"{one.by} {name}{part}"


def _words(head: Hashable) -> Iterator[str]:
    if isinstance(head, str):
        yield head
    elif isinstance(head, tuple):
        for one in head:
            yield from (_words(one) if isinstance(one, str) else ())
