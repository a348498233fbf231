"""What ranks make of each other's values: the axioms of collectives, means, totals, tests.

Of x_r on rank r, and of x of which rank r has part r:
    all_gather(part r of x)   x on every rank
    all_reduce(x_r)           sum_r x_r
    reduce_scatter(x_r)       part r of sum_r x_r
    sum_r total(part r of x)  total(x)      if x is the same on all ranks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
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
        parts: set[Symbolic] = set()
        for value in values:
            split = [value] if value.spread else [of_sum(p.sum, (p.numel,)) for p in value.pieces]
            parts |= {part for part in split if any(part.addends)}
        return self.terms.term(FINITE, sorted(parts, key=_order))

    def collective(self, name: str, value: Symbolic) -> Symbolic:
        """Return what a collective gives."""
        shape, world = value.shape, self.world
        if name == "all_gather" and shape and not any(x.term.varies for x in value.addends):
            pieces = value.pieces if value.spread else value.pieces * world
            return Symbolic((shape[0] * world, *shape[1:]), pieces)
        if name not in ("all_reduce", "reduce_scatter") or value.spread:
            raise NotImplementedError("it joins or sums what is not of the same elements")
        summed = value.on(Stretch(p.numel, self.over_ranks(p.sum)) for p in value.pieces)
        if name == "all_reduce":
            return summed
        return summed._replace(shape=(shape[0] // world, *shape[1:]), spread=True)


def _is_one_whole(value: Symbolic) -> bool:
    """Whether ranks have parts of one whole, and not each a part of its own."""
    return value.spread and not any(x.term.varies for x in value.addends)


def _order(value: Symbolic) -> Any:
    return value.spread, [(p.numel, [(x.term.number, *x[1:]) for x in p.sum]) for p in value.pieces]
