"""How a program is read, and what ranks make of each other's values: sums, means, totals."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from torch import fx

from fzero.tools.prove._terms import (
    UNIFORM,
    Addend,
    Piece,
    Sum,
    Term,
    Terms,
    Value,
    added,
    cut,
    joined,
    of_term,
    scaled,
    whole,
)

OVER_RANKS = "sum over ranks"
TOTAL = "total"
OWN_TOTAL = "total of its part"
FINITE = "finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a program is read.

    one_rank: as the reference, in which what comes of the batch is read as its mean over `world`
    ranks wherever the update uses it. local: the nodes before the update, which make losses and
    gradients of the batch as it is. own_parts: the nodes that select the part of their rank.
    """

    terms: Terms
    world: int
    one_rank: bool
    local: frozenset[fx.Node] = frozenset()
    own_parts: frozenset[fx.Node] = frozenset()

    def settled(self, node: fx.Node, one: Sum) -> Sum:
        """Return what a function of the update is given: in the reference the mean over ranks."""
        return self.mean(one) if self.one_rank and node not in self.local else one

    def mean(self, one: Sum) -> Sum:
        """Return the mean over ranks of what each of them has."""
        if not any(x.term.varies for x in one):
            return one
        return scaled(self.over_ranks(one), Fraction(1, self.world))

    def over_ranks(self, one: Sum) -> Sum:
        """Return the sum over ranks of what each of them has: linear, and W x where all have x."""
        if self.world == 1:
            return one
        found: Sum = ()
        for x in one:
            if not x.term.varies:
                made: Sum = (x._replace(by=x.by * self.world),)
            elif x.term.head == OWN_TOTAL:
                made = scaled(self.total(x.term.operands[0]._replace(spread=False)), x.by)
            else:
                operand = of_term(x.term, (x.term.numel,))
                term = self.terms.term(
                    OVER_RANKS, [operand], numel=x.term.numel, varies=False
                )
                made = (x._replace(term=term),)
            found = added(found, made)
        return found

    def total(self, value: Value) -> Sum:
        """Return the sum of all elements of a rank; of a spread value those of its part."""
        if value.spread:
            flat = value._replace(shape=(value.numel,))
            return whole(self.terms.term(OWN_TOTAL, [flat]))
        found: Sum = ()
        for piece in value.pieces:
            for x in piece.sum:
                found = added(found, self._total_of(x, piece.numel))
        return found

    def _total_of(self, x: Addend, numel: int) -> Sum:
        if x.start == UNIFORM:
            return (x._replace(by=x.by * numel),)
        one = Value((numel,), (Piece(numel, (x._replace(by=Fraction(1)),)),))
        return (Addend(self.terms.term(TOTAL, [one]), UNIFORM, x.by),)

    def finite(self, values: Sequence[Value]) -> Term:
        """Return whether all elements of some values are finite: 1, or 0 if one of them is not.

        Of a spread value those of the rank's part.
        """
        parts = [value for value in values if value.spread]
        pieces = {
            Value((piece.numel,), (piece,))
            for value in values
            if not value.spread
            for piece in value.pieces
            if piece.sum
        }
        return self.terms.term(FINITE, [*sorted(parts, key=_order), *sorted(pieces, key=_order)])

    def finite_everywhere(self, one: Term) -> Term | None:
        """Return whether it is so on all ranks, of a `finite` term of their parts."""
        varying = [value for value in one.operands if value.varies]
        if any(not value.spread or _differs(value) for value in varying):
            return None
        return self.finite([value._replace(spread=False) for value in one.operands])


def _differs(value: Value) -> bool:
    return any(x.term.varies for piece in value.pieces for x in piece.sum)


def _order(value: Value) -> Hashable:
    return [(piece.numel, [(x.term.number, x.start, x.by) for x in piece.sum]) for piece in value.pieces]


class Call(NamedTuple):
    """An op of a program, with values in the place of tensors."""

    reading: Reading
    node: fx.Node
    name: str  # without "_" if it writes in place
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> list[Value]:
        """The tensors among the arguments, in order."""
        return list(_values((self.args, tuple(self.kwargs.values()))))

    @property
    def constants(self) -> Hashable:
        """The arguments with None in the place of each tensor."""
        named = tuple(sorted((name, _frozen(x)) for name, x in self.kwargs.items() if x is not None))
        return tuple(map(_frozen, self.args)), named

    def stretched(self, value: Value, numel: int, *, spread: bool) -> tuple[Piece, ...]:
        """Return the pieces of a value as elements of an op, which has `numel` on each rank."""
        total = numel * (self.reading.world if spread else 1)
        one = value.uniform
        if one is not None:
            return joined([Piece(total, one)])
        if spread and not value.spread:
            return joined(value.pieces * self.reading.world)
        return value.pieces


def _values(x: Any) -> Any:
    if isinstance(x, Value):
        yield x
    elif isinstance(x, tuple | list):
        for one in x:
            yield from _values(one)


def _frozen(x: Any) -> Hashable:
    if isinstance(x, Value):
        return None
    if isinstance(x, tuple | list):
        return tuple(map(_frozen, x))
    return x if isinstance(x, int | float | bool | str | None) else str(x)


__all__ = ["FINITE", "Call", "Reading", "cut"]
