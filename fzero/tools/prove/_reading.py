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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

from torch import fx

from fzero.tools.prove._terms import (
    UNIFORM,
    Addend,
    Stretch,
    Sum,
    Symbolic,
    Term,
    Terms,
    added,
    aligned,
    cut,
    joined,
    of_sum,
    scaled,
    whole,
)

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
        found: Sum = ()
        for x in one:
            if not x.term.varies:
                made: Sum = (x._replace(by=x.by * self.world),)
            elif x.term.head == OWN_TOTAL and _is_one_whole(x.term.operands[0]):
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
        return self.terms.term(FINITE, sorted(parts, key=_order))

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
        ranks = range(len(values))
        if len({value.shape for value in values}) > 1:
            raise NotImplementedError("ranks hand in other shapes")
        (size, *rest), varying = (
            values[0].shape or (1,),
            [
                value.on(
                    Stretch(p.numel, tuple(x for x in p.sum if x.term.varies)) for p in value.pieces
                )
                for value in values
            ],
        )
        if name == "all_gather" and values[0].shape and not any(any(x.addends) for x in varying):
            pieces = joined(p for value in values for p in value.pieces)
            return [Symbolic((size * self.world, *rest), pieces) for _ in ranks]
        if name not in ("all_reduce", "reduce_scatter") or len({*varying}) > 1:
            raise NotImplementedError("it joins or sums what ranks have made in other ways")
        rows = [[Stretch(p.numel, self.over_ranks(p.sum)) for p in varying[0].pieces]]
        rows += [
            [Stretch(p.numel, tuple(x for x in p.sum if not x.term.varies)) for p in value.pieces]
            for value in values
        ]
        pieces = (Stretch(n, self._joined_totals(reduce(added, sums))) for n, sums in aligned(rows))
        summed = values[0].on(pieces)
        return [
            summed if name == "all_reduce" else self._part(summed, r, len(values)) for r in ranks
        ]

    def _joined_totals(self, one: Sum) -> Sum:
        """total(x[:a]) + total(x[a:]) = total(x)."""
        rest: Sum = tuple(x for x in one if x.term.head != TOTAL)
        for by in {x.by for x in one if x.term.head == TOTAL}:
            parts = (
                x.term.operands[0].pieces[0] for x in one if x.term.head == TOTAL and x.by == by
            )
            for piece in _in_order(parts):
                made = self.total(of_sum(piece.sum, (piece.numel,)))
                rest = added(rest, scaled(made, by))
        return rest


def _in_order(pieces: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Return pieces of the same tensors joined, where they go on with each other."""
    return joined(sorted(pieces, key=lambda p: [(x.term.number, *x[1:]) for x in p.sum]))


def _is_one_whole(value: Symbolic) -> bool:
    """Whether ranks have parts of one whole, and not each a part of its own."""
    return value.spread and not any(x.term.varies for x in value.addends)


def _order(value: Symbolic) -> Any:
    return value.spread, [(p.numel, [(x.term.number, *x[1:]) for x in p.sum]) for p in value.pieces]
