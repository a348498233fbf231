"""What ranks make of each other's values: the axioms of collectives, means, totals, tests.

Of x_r on rank r, and of x of which rank r has part r:
    all_gather(part r of x)   x on every rank
    all_reduce(x_r)           sum_r x_r
    reduce_scatter(x_r)       part r of sum_r x_r
    sum_r total(part r of x)  total(x)      if x is the same on all ranks

One program may stand for all ranks; or the programs of all are read beside each other, where each
has other pieces of leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

T = TypeVar("T")

# The CPU time that a proof may take.

DEFAULT_S = 60.0


class OutOfBudget(Exception):
    """The CPU time is spent."""


class Budget:
    """So many seconds of this thread's CPU time, from now on, for each of so many ranks."""

    def __init__(
        self, seconds: float = DEFAULT_S, ranks: int = 1, within: Budget | None = None
    ) -> None:
        self.seconds = seconds
        until = time.thread_time() + seconds * ranks
        self._until = until if within is None else min(until, within._until)

    def of_one(self) -> Budget:
        """Return a budget for one program, within this one."""
        return Budget(self.seconds, within=self)

    def check(self, what: str = "") -> None:
        """Raise `OutOfBudget` if it is spent, at `what`."""
        if time.thread_time() > self._until:
            raise OutOfBudget(f"the budget of {self.seconds:g} s of CPU time is spent{what}")


# What a tensor is, as an expression over the inputs of a step: exact, over the reals.
#
# A `Term` is a tensor that a function makes of others; terms of one head and the same operands are
# one object. A `Sum` is a linear combination of elements of terms, with rational coefficients. A
# `Symbolic` is a tensor as pieces in a row, each of one sum.

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
        key = head, given, numel
        if key not in self._made:
            if varies is None:
                varies = any(x.spread or any(y.term.varies for y in x.addends) for x in given)
            self._made[key] = Term(*key, varies, len(self._made))
        return self._made[key]

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


OVER_RANKS, TOTAL, OWN_TOTAL, FINITE = "sum over ranks", "total", "total of its part", "finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpretation:
    """How a program is read.

    one_rank: as the reference, in which what is handed to the reduction is read as its mean over
    `world` ranks. axis: name and group of what collectives are over. own_parts: nodes that select a
    rank's part.
    """

    terms: Terms
    world: int
    one_rank: bool
    axis: tuple[str, str] = ("", "")
    own_parts: frozenset[fx.Node] = frozenset()

    def mean(self, one: Sum) -> Sum:
        """Return the mean over ranks of what each has."""
        varies = any(x.term.varies for x in one)
        return scaled(self.over_ranks(one), Fraction(1, self.world)) if varies else one

    def over_ranks(self, one: Sum) -> Sum:
        """Return the sum over ranks of what each has: linear, and W x where all have x."""
        if self.world == 1:
            return one

        def is_one_whole(value: Symbolic) -> bool:
            """Whether ranks have parts of one whole, and not each a part of its own."""
            return value.spread and not any(x.term.varies for x in value.addends)

        found: Sum = ()
        for x in one:
            if not x.term.varies:
                made: Sum = (x._replace(by=x.by * self.world),)
            elif x.term.head == OWN_TOTAL and is_one_whole(x.term.operands[0]):
                made = scaled(self.total(x.term.operands[0]._replace(spread=False)), x.by)
            else:
                inner = [of_sum(whole(x.term), (x.term.numel,))]
                term = self.terms.term(OVER_RANKS, inner, x.term.numel, varies=False)
                made = (x._replace(term=term),)
            found = added(found, made)
        return found

    def total(self, value: Symbolic) -> Sum:
        """Return the sum of all elements that a rank has."""
        if value.spread:
            return whole(self.terms.term(OWN_TOTAL, [value._replace(shape=(value.numel,))]))
        found: Sum = ()
        for piece in value.pieces:
            for term, start, by in piece.sum:
                if start == UNIFORM:
                    made = Addend(term, start, by * piece.numel)
                else:
                    part = of_sum((Addend(term, start, Fraction(1)),), (piece.numel,))
                    made = Addend(self.terms.term(TOTAL, [part]), UNIFORM, by)
                found = added(found, (made,))
        return found

    def finite(self, values: Iterable[Symbolic]) -> Term:
        """Return 1 if all elements that a rank has of some values are finite, else 0."""
        given = list(values)
        parts = {value for value in given if value.spread and any(value.addends)}
        pieces = {p for value in given if not value.spread for p in value.pieces if p.sum}
        parts |= {of_sum(p.sum, (p.numel,)) for p in _in_order(pieces)}

        def order(value: Symbolic) -> Any:
            pieces = [(p.numel, [(x.term.number, *x[1:]) for x in p.sum]) for p in value.pieces]
            return value.spread, pieces

        return self.terms.term(FINITE, sorted(parts, key=order))

    def collective(self, name: str, values: Sequence[Symbolic]) -> list[Symbolic]:
        """Return what a collective gives: of what each rank has; or of that of one for all."""
        if len(values) > 1 and len({*values}) > 1:
            return self._of_unlike(name, values)
        return [self._of_alike(name, values[0], rank, len(values)) for rank in range(len(values))]

    def _of_alike(self, name: str, value: Symbolic, rank: int, ranks: int) -> Symbolic:
        """Return what a rank gets; where one stands for all ranks, as parts."""
        shape, world = value.shape, self.world
        if name == "all_gather" and shape and not any(x.term.varies for x in value.addends):
            pieces = value.pieces if value.spread else value.pieces * world
            return Symbolic((shape[0] * world, *shape[1:]), joined(pieces))
        if name not in ("all_reduce", "reduce_scatter") or value.spread:
            raise NotImplementedError("it joins or sums what is not of the same elements")
        summed = value.on(Stretch(p.numel, self.over_ranks(p.sum)) for p in value.pieces)
        return summed if name == "all_reduce" else self._part(summed, rank, ranks)

    def _part(self, summed: Symbolic, rank: int, ranks: int) -> Symbolic:
        shape = summed.shape[0] // self.world, *summed.shape[1:]
        if ranks == 1 < self.world:
            return summed._replace(shape=shape, spread=True)
        numel = summed.numel // self.world
        return Symbolic(shape, cut(summed.pieces, rank * numel, numel))

    def _of_unlike(self, name: str, values: Sequence[Symbolic]) -> list[Symbolic]:
        """Return the same of ranks that have something else each: what varies must be alike."""
        if len({value.shape for value in values}) > 1:
            raise NotImplementedError("ranks hand in other shapes")

        def only_if(value: Symbolic, *, varies: bool) -> Symbolic:
            """Return the addends that are each rank's own, or those that are not."""
            some = ((p, (x for x in p.sum if x.term.varies is varies)) for p in value.pieces)
            return value.on(Stretch(p.numel, tuple(own)) for p, own in some)

        first, varying = values[0], [only_if(value, varies=True) for value in values]
        if name == "all_gather" and first.shape and not any(any(x.addends) for x in varying):
            size, *rest = first.shape
            pieces = joined(p for value in values for p in value.pieces)
            return [Symbolic((size * self.world, *rest), pieces)] * len(values)
        if name not in ("all_reduce", "reduce_scatter") or len({*varying}) > 1:
            raise NotImplementedError("it joins or sums what ranks have made in other ways")
        rows = [[Stretch(p.numel, self.over_ranks(p.sum)) for p in varying[0].pieces]]
        rows += [[*only_if(value, varies=False).pieces] for value in values]
        totals = ((n, self._joined_totals(reduce(added, sums))) for n, sums in aligned(rows))
        summed = first.on(Stretch(n, one) for n, one in totals)
        if name == "all_reduce":
            return [summed] * len(values)
        return [self._part(summed, rank, len(values)) for rank in range(len(values))]

    def _joined_totals(self, one: Sum) -> Sum:
        """total(x[:a]) + total(x[a:]) = total(x)."""
        rest: Sum = tuple(x for x in one if x.term.head != TOTAL)
        totals = [x for x in one if x.term.head == TOTAL]
        for by in {x.by for x in totals}:
            for piece in _in_order(x.term.operands[0].pieces[0] for x in totals if x.by == by):
                made = self.total(of_sum(piece.sum, (piece.numel,)))
                rest = added(rest, scaled(made, by))
        return rest


def _in_order(pieces: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Return pieces of the same tensors joined, where they go on with each other."""
    return joined(sorted(pieces, key=lambda p: [(x.term.number, *x[1:]) for x in p.sum]))


# An op of a program as it is called: every argument by name, with values in place of tensors.


class OpCall(NamedTuple):
    """A call of an ATen op.

    target: the exact overload whose meaning counts; of a write in place, the one out of place.
    args: all arguments of the schema, also those that were left out, in its order. dtypes: of the
    tensors among them, in order. results: (shape, dtype) of each. draw: its number among the draws.
    """

    reading: Interpretation
    target: torch._ops.OpOverload
    args: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
    several: bool = False
    draw: int = 0

    @property
    def terms(self) -> Terms:
        """All terms."""
        return self.reading.terms

    @property
    def values(self) -> list[Symbolic]:
        """The tensors among the arguments, in order."""
        return list(_all_of(Symbolic, tuple(self.args.values())))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first result."""
        return self.results[0][1] if self.results else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.results[0][0]

    def head(self, *more: Hashable) -> tuple[Hashable, ...]:
        """Return what names this function of tensors: the op and all that is no tensor."""
        code = tuple((name, _encoded(name, x)) for name, x in self.args.items())
        name = self.target._schema.name.split("::")[1]
        made = tuple(dtype for _, dtype in self.results)
        return name, self.target, self.dtypes, made, code, *more


def _all_of(kind: type[T], x: Any) -> Iterator[T]:
    """Yield all of a kind in an argument."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, tuple | list):
        for one in x:
            yield from _all_of(kind, one)


def _encoded(name: str, x: Any) -> Hashable:
    """Return an argument with its type: 1, 1.0 and True are three, None is no tensor."""
    if isinstance(x, Symbolic):
        return "tensor"
    if isinstance(x, tuple | list):
        return ("list", *(_encoded(name, one) for one in x))
    if isinstance(x, float):
        return "float", x.hex()
    if x is None or isinstance(x, bool | int | str | complex):
        return type(x).__name__, repr(x)
    if isinstance(x, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return type(x).__name__, str(x)
    raise NotImplementedError(f"its argument {name} is a {type(x).__name__}")


def call_of(
    reading: Interpretation,
    node: fx.Node,
    value: Callable[[Any], Any],
    *,
    target: torch._ops.OpOverload | None = None,
) -> OpCall:
    """Return the call that a node is, complete: defaults are filled in by the schema."""
    op: Any = node.target
    schema = {one.name: one for one in op._schema.arguments}
    given = dict(zip(schema, node.args, strict=False)) | dict(node.kwargs)
    lacks = [k for k, one in schema.items() if k not in given and not one.has_default_value()]
    if lacks or len(node.args) > len(schema) or given.keys() - schema.keys():
        raise NotImplementedError(f"{op} is called with other arguments than it has")
    full = {name: given.get(name, one.default_value) for name, one in schema.items()}
    val = node.meta.get("val")
    several = isinstance(val, list | tuple)
    made: Any = val if several else [val]
    return OpCall(
        reading=reading,
        target=target or op,
        args={name: value(x) for name, x in full.items()},
        dtypes=tuple(one.meta["val"].dtype for one in _all_of(fx.Node, tuple(full.values()))),
        results=tuple((tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)) for x in made),
        several=several,
    )
