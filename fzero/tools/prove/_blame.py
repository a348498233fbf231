"""Where a fault begins: at the first value that the one-rank program does not explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fzero.tools.prove._programs import BufferPlace, Key
from fzero.tools.prove._read import ProgramRead
from fzero.tools.prove._reading import FINITE, OVER_RANKS, OWN_TOTAL, Interpretation
from fzero.tools.prove._terms import UNIFORM, Sum, Symbolic, Term


class Explained:
    """What the values of a sound program may be.

    A sum that the one-rank program has, of one rank or over ranks, divided by one of the `divisors`
    or not: gradients are so on their way to the mean. In a buffer of the state, each leaf where a
    group has it, and zeros or what was there between them.
    """

    def __init__(
        self,
        reading: Interpretation,
        made: Iterable[Symbolic],
        leaves: Iterable[tuple[Key, Symbolic | None]],
        divisors: Iterable[Fraction],
    ) -> None:
        self._reading, self._divisors = reading, {Fraction(1), *divisors}
        self._known: dict[Any, set[Fraction]] = {}
        self._leaves: dict[Term, set[str]] = {}  # that become of a term, element by element
        for value in made:
            self._learn(value)
        for (_, path), value in leaves:
            self._follow(value, path, 6)

    def _learn(self, value: Symbolic) -> None:
        for one in (piece.sum for piece in value.pieces):
            pattern, by = _pattern(one)
            if by in self._known.get(pattern, ()):
                continue
            varies = any(x.term.varies for x in one)
            for pattern, by in map(_pattern, (one, self._reading.over_ranks(one))):
                known = self._known.setdefault(pattern, set())
                known.update(by / x for x in self._divisors if varies or x == 1)
            for operand in (operand for x in one for operand in x.term.operands):
                self._learn(operand)

    def _follow(self, value: Symbolic | None, path: str, depth: int) -> None:
        if value is None or not path:
            return
        for term in (x.term for x in value.addends):
            if term.numel == value.numel:
                self._leaves.setdefault(term, set()).add(path)
                for operand in term.operands if depth else ():
                    self._follow(operand, path, depth - 1)

    def explains(self, value: Symbolic, places: Sequence[BufferPlace]) -> bool:
        """Return whether a value may be in a sound program with these buffers."""
        total = sum(piece.numel for piece in value.pieces)
        fits = [
            self._fits(value, place)
            for place in places
            if place.setup is not None and place.setup.layout.full_numel(place.group) == total
        ]
        padded = {self._pads(piece.sum) for piece in value.pieces if piece.sum}
        return self._knows(value) and (any(fits) if fits else len(padded) < 2)

    def _knows(self, value: Symbolic) -> bool:
        sums = [piece.sum for piece in value.pieces if piece.sum and not self._pads(piece.sum)]
        mixed = value.spread and any(x.term.varies for one in sums for x in one)
        return not mixed and all(map(self._knows_sum, sums))

    def _knows_sum(self, one: Sum) -> bool:
        for pattern, by in map(_pattern, (one, self._reading.over_ranks(one))):
            if by in self._known.get(pattern, ()):
                return True
        return all(x.term.head == "one" or self._knows_own(x.term) for x in one)

    def _knows_own(self, term: Term) -> bool:
        """Whether a term is a total, a largest one, or a test, of parts that are explained."""
        if term.name in ("abs", OVER_RANKS):
            return all(self._knows_own(x.term) for x in term.operands[0].addends)
        own = term.head in (OWN_TOTAL, "largest", FINITE)
        return own and all(map(self._knows, term.operands))

    def _fits(self, value: Symbolic, place: BufferPlace) -> bool:
        at = 0
        for piece in value.pieces:
            inside = {path: s for path, s, numel in place.leaves if s <= at < s + numel}
            for x in piece.sum:
                known = self._leaves.get(x.term)
                if x.term.head == "one" and not inside:
                    return False  # padding that is not zero
                if known and not any(inside.get(path) == at - max(x.start, 0) for path in known):
                    return False
            at += piece.numel
        return True

    def _pads(self, one: Sum, depth: int = 4) -> bool:
        """Whether a sum is of padding, or of memory that nobody has written to."""
        return depth > 0 and any(
            x.term.name in ("padding", "unwritten")
            or (
                x.term.name in ("update", "mul", "where", "clamp")
                and any(self._pads(p.sum, depth - 1) for v in x.term.operands for p in v.pieces)
            )
            for x in one
        )


def _pattern(one: Sum) -> tuple[Any, Fraction]:
    """Return a sum without its factor and without where it starts, and the factor."""
    first = next((x.start for x in one if x.start != UNIFORM), 0)
    by = one[0].by if one else Fraction(1)
    starts = [x.start if x.start == UNIFORM else x.start - first for x in one]
    return tuple((x.term, s, x.by / by) for x, s in zip(one, starts, strict=True)), by


def first_unexplained(
    read: ProgramRead, explained: Explained, places: Sequence[BufferPlace], ends: Iterable[fx.Node]
) -> fx.Node | None:
    """Return the first node that makes what is not explained, of those that `ends` come from."""
    wanted: set[fx.Node] = set()
    rest = list(ends)
    while rest:
        node = rest.pop()
        if node not in wanted:
            wanted.add(node)
            rest += [*node.all_input_nodes, *read.writers.get(node, ())]
    for node, values in read.made.items():
        # A norm of a part is a number of one rank alone, and explained if its operand is.
        norm = node.target is torch.ops.aten.linalg_vector_norm.default
        if node in wanted and not norm and not all(explained.explains(x, places) for x in values):
            return node
    return None
