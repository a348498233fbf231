"""What a tensor is, as an expression over the inputs of a step: exact, over the reals.

A `Term` is a tensor that a function makes of others; terms of one head and the same operands are
one object. A `Sum` is a linear combination of elements of terms, with rational coefficients. A
`Symbolic` is a tensor as pieces in a row, each of one sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

from fzero.tools.prove._budget import Budget

UNIFORM = -1
"""The start of a term of one element, which stands for every element."""


class Addend(NamedTuple):
    """c t[start:]."""

    term: Term
    start: int
    by: Fraction


Sum = tuple[Addend, ...]
"""Each (term, start) once, in the order of the terms. (): zero."""


class Stretch(NamedTuple):
    """So many elements in a row, from the first ones of a sum on."""

    numel: int
    sum: Sum


class Symbolic(NamedTuple):
    """A tensor. spread: each rank has one of W equal parts of the pieces, in rank order; else all.

    A term in it may be another one on each rank: see `Term.varies`.
    """

    shape: tuple[int, ...]
    pieces: tuple[Stretch, ...]
    spread: bool = False

    @property
    def numel(self) -> int:
        """Elements on one rank."""
        return prod(self.shape)

    @property
    def addends(self) -> Iterator[Addend]:
        """The addends of all pieces."""
        return (x for piece in self.pieces for x in piece.sum)

    @property
    def uniform(self) -> Sum | None:
        """The sum that every element is, or None."""
        one = self.pieces[0].sum if len(self.pieces) == 1 else None
        return one if one is not None and all(x.start == UNIFORM for x in one) else None

    def on(self, pieces: Iterable[Stretch]) -> Symbolic:
        """Return a value of the same shape with other pieces."""
        return self._replace(pieces=joined(pieces))


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A tensor made by a function, `head`. varies: it is of one rank's batch, shard or draws."""

    head: Hashable
    operands: tuple[Symbolic, ...]
    numel: int
    varies: bool
    number: int

    @property
    def name(self) -> Hashable:
        """What the head begins with."""
        return self.head[0] if isinstance(self.head, tuple) else self.head


class Terms:
    """All terms of a proof."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Term] = {}
        self._budget: Budget | None = None

    @contextmanager
    def within(self, budget: Budget | None) -> Iterator[None]:
        """Make terms within a budget in this block."""
        self._budget = budget
        try:
            yield
        finally:
            self._budget = None

    def term(
        self,
        head: Hashable,
        operands: Iterable[Symbolic] = (),
        numel: int = 1,
        varies: bool | None = None,
    ) -> Term:
        """Return the term of a head and operands; by default it varies if one of these does."""
        if self._budget is not None:
            self._budget.check()
        given = tuple(operands)
        found = self._made.get((head, given, numel))
        if found is None:
            differs = any(one.spread or any(x.term.varies for x in one.addends) for one in given)
            varies = differs if varies is None else varies
            found = self._made[head, given, numel] = Term(
                head, given, numel, varies, len(self._made)
            )
        return found

    def number(self, number: Fraction) -> Sum:
        """Return every element of a constant tensor."""
        return scaled(whole(self.term("one")), number)


def exact(number: float) -> Fraction:
    """Return the simplest quotient that rounds to a number.

    Example:
        >>> exact(0.1), exact(2 / 3), exact(3)
        (Fraction(1, 10), Fraction(2, 3), Fraction(3, 1))
    """
    simple = Fraction(number).limit_denominator(10**6)
    return simple if float(simple) == number else Fraction(number)


def whole(term: Term) -> Sum:
    """Return a term as a sum."""
    return (Addend(term, UNIFORM if term.numel == 1 else 0, Fraction(1)),)


def of_term(term: Term, shape: Sequence[int]) -> Symbolic:
    """Return a term as a value."""
    return of_sum(whole(term), shape)


def of_sum(one: Sum, shape: Sequence[int] = ()) -> Symbolic:
    """Return a value of one piece."""
    return Symbolic(tuple(shape), joined([Stretch(prod(shape), one)]))


def constant(one: Sum) -> Fraction | None:
    """Return the number that a sum is; None if it is none."""
    if len(one) == 1 and one[0].term.head == "one":
        return one[0].by
    return None if one else Fraction(0)


def only(one: Sum) -> Term | None:
    """Return the term that a sum is; None if it is none."""
    return one[0].term if len(one) == 1 and one[0].by == 1 else None


def scaled(one: Sum, by: Fraction) -> Sum:
    """Return a sum times a number."""
    return tuple(x._replace(by=x.by * by) for x in one) if by else ()


def added(a: Sum, b: Sum) -> Sum:
    """Return a + b."""
    if not (a and b):
        return a or b
    found = {(x.term, x.start): x.by for x in a}
    for term, start, by in b:
        found[term, start] = found.get((term, start), 0) + by
    rest = (Addend(*key, by) for key, by in found.items() if by)
    return tuple(sorted(rest, key=lambda x: (x.term.number, x.start)))


def moved(one: Sum, by: int) -> Sum:
    """Return the sum from `by` elements further on."""
    return tuple(x if x.start == UNIFORM else x._replace(start=x.start + by) for x in one)


def joined(pieces: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Return pieces without empty ones, and as one where they go on with each other."""
    found: list[Stretch] = []
    for piece in pieces:
        if found and moved(found[-1].sum, found[-1].numel) == piece.sum:
            found[-1] = Stretch(found[-1].numel + piece.numel, found[-1].sum)
        elif piece.numel:
            found.append(piece)
    return tuple(found)


def cut(pieces: Iterable[Stretch], start: int, numel: int) -> tuple[Stretch, ...]:
    """Return `numel` elements from `start` on."""
    found, at = [], 0
    for piece in pieces:
        first, last = max(at, start), min(at + piece.numel, start + numel)
        if first < last:
            found.append(Stretch(last - first, moved(piece.sum, first - at)))
        at += piece.numel
    return tuple(found)


def aligned(rows: Sequence[Sequence[Stretch]]) -> Iterator[tuple[int, list[Sum]]]:
    """Yield (numel, the sum of each row), as long as no row changes."""
    rest = [list(reversed(row)) for row in rows]
    while any(rest):
        heads = [row.pop() for row in rest]
        numel = min(head.numel for head in heads)
        for row, head in zip(rest, heads, strict=True):
            if head.numel > numel:
                row.append(Stretch(head.numel - numel, moved(head.sum, numel)))
        yield numel, [head.sum for head in heads]


def text_of(value: Symbolic, depth: int = 3) -> str:
    """Return a short text: "1/2 sum over ranks(mm(args[0], ...))"."""
    shown = [" + ".join(_text(x, depth) for x in piece.sum[:3]) for piece in value.pieces[:3]]
    text = ", ".join(one or "0" for one in shown)
    text = text if len(value.pieces) < 2 else f"[{text}, ...]"
    return f"the rank's part of {text}" if value.spread else text


def _text(x: Addend, depth: int) -> str:
    if x.term.head == "one":
        return str(x.by)
    head = x.term.head if isinstance(x.term.head, tuple) else (x.term.head,)
    head = tuple(one for one in head if isinstance(one, str | int | float))
    inner = ", ".join(text_of(one, depth - 1) for one in x.term.operands) if depth else "..."
    name = f"{head[0]}({inner})" if x.term.operands else " ".join(map(str, head))
    return f"{'' if x.by == 1 else f'{x.by} '}{name}{f'[{x.start}:]' if x.start > 0 else ''}"
