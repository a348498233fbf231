"""Where in a program a fault begins: the first value that the one-rank program does not explain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fzero.tools.prove._read import UNKNOWN, Read
from fzero.tools.prove._reading import FINITE, OVER_RANKS, OWN_TOTAL, Reading
from fzero.tools.prove._state import Key, Place, leaves_of_group
from fzero.tools.prove._terms import UNIFORM, Sum, Term, Value

Pattern = tuple[tuple[Term, int, Fraction], ...]
"""A sum up to a factor, and to where it starts."""


class Explained:
    """What the values of a sound program may be, by the one-rank program.

    A sum is explained if it is one of that program, as of the own batch or as the sum or mean over
    ranks, or divided by one of the `divisors`: gradients are so on their way to the mean.
    """

    def __init__(
        self,
        reading: Reading,
        made: Iterable[Sequence[Value]],
        outputs: Mapping[Key, Value | None],
        divisors: Iterable[Fraction],
    ) -> None:
        self._reading, self._divisors = reading, frozenset(divisors)
        self._known: dict[Pattern, set[Fraction]] = {}
        self._leaf_of: dict[Term, set[str]] = {}
        self._of_padding: dict[Term, bool] = {}
        for values in made:
            for value in values:
                for piece in value.pieces:
                    self._learn(piece.sum)
        for (_, path), value in outputs.items():
            if value is not None and path:
                self._follow(value, path, value.numel, 6)

    def _learn(self, one: Sum) -> None:
        """Note a sum, and those that its terms are made of."""
        pattern, by = _pattern(one)
        if by in self._known.get(pattern, ()):
            return
        varies = any(x.term.varies for x in one)
        for form in (one, self._reading.mean(one), self._reading.over_ranks(one)):
            pattern, by = _pattern(form)
            known = self._known.setdefault(pattern, set())
            known |= {by, *(by / divisor for divisor in self._divisors if varies)}
        for operand in (value for x in one for value in x.term.operands):
            for piece in operand.pieces:
                self._learn(piece.sum)

    def _follow(self, value: Value, path: str, numel: int, depth: int) -> None:
        """Note the leaf of terms which become, element by element, a new value of it."""
        for piece in value.pieces:
            for term in (x.term for x in piece.sum):
                if term.numel != numel:
                    continue
                self._leaf_of.setdefault(term, set()).add(path)
                for operand in term.operands if depth else ():
                    self._follow(operand, path, numel, depth - 1)

    def explains(self, value: Value, places: Sequence[Place]) -> bool:
        """Return whether a value may be in a sound program. `places`: the buffers of the state."""
        return self._knows_all(value) and self._is_in_place(value, places)

    def _knows_all(self, value: Value) -> bool:
        sums = [piece.sum for piece in value.pieces if piece.sum and not self._is_padding(piece.sum)]
        if value.spread and any(x.term.varies for one in sums for x in one):
            return False
        return all(map(self._knows, sums))

    def _knows(self, one: Sum) -> bool:
        for form in (one, self._reading.over_ranks(one)):
            pattern, by = _pattern(form)
            if by in self._known.get(pattern, ()):
                return True
        return all(x.term.head == "one" or self._knows_own(x.term) for x in one)

    def _knows_own(self, term: Term) -> bool:
        """Whether a term is a total, a largest one, or a test, of parts that are explained."""
        inner = term.operands[0] if term.operands else None
        if term.head not in (OWN_TOTAL, "largest", FINITE) and _name(term) not in ("abs", OVER_RANKS):
            return False
        if _name(term) in ("abs", OVER_RANKS) and inner is not None:
            return all(self._knows_own(x.term) for piece in inner.pieces for x in piece.sum)
        return all(map(self._knows_all, term.operands))

    def _is_in_place(self, value: Value, places: Sequence[Place]) -> bool:
        """Whether the elements of each leaf are where some group has them."""
        total = sum(piece.numel for piece in value.pieces)
        groups = [
            place
            for place in places
            if place.setup is not None and place.setup.layout.full_numel(place.group) == total
        ]
        padded = [self._is_padding(piece.sum) for piece in value.pieces if piece.sum]
        if not groups:
            return not any(padded) or all(padded)
        return any(self._fits(value, list(leaves_of_group(place))) for place in groups)

    def _fits(self, value: Value, leaves: Sequence[tuple[str, int, int]]) -> bool:
        at = 0
        for piece in value.pieces:
            inside = [leaf for leaf in leaves if leaf[1] <= at < leaf[1] + leaf[2]]
            for x in piece.sum:
                known = self._leaf_of.get(x.term)
                if x.term.head == "one" and not inside:
                    return False  # padding that is not zero
                if known and not any(path in known and max(x.start, 0) == at - start for path, start, _ in inside):
                    return False
            at += piece.numel
        return True

    def _is_padding(self, one: Sum) -> bool:
        return any(self._pads(x.term, 3) for x in one)

    def _pads(self, term: Term, depth: int) -> bool:
        found = self._of_padding.get(term)
        if found is None:
            inner = (x.term for value in term.operands for piece in value.pieces for x in piece.sum)
            elementwise = _name(term) in ("update", "mul", "where", "clamp")
            found = _name(term) in ("padding", "unwritten") or (
                elementwise and depth > 0 and any(self._pads(x, depth - 1) for x in inner)
            )
            self._of_padding[term] = found
        return found


def _name(term: Term) -> Any:
    return term.head[0] if isinstance(term.head, tuple) else term.head


def _pattern(one: Sum) -> tuple[Pattern, Fraction]:
    if not one:
        return (), Fraction(1)
    first, by = next((x.start for x in one if x.start != UNIFORM), 0), one[0].by
    return tuple((x.term, x.start if x.start == UNIFORM else x.start - first, x.by / by) for x in one), by


def first_unexplained(read: Read, explained: Explained, places: Sequence[Place], ends: Iterable[fx.Node]) -> fx.Node | None:
    """Return the first node that makes what is not explained, of those that `ends` come from."""
    wanted = _sources(read, ends)
    for node, values in read.made.items():
        if node in wanted and not _is_norm(node):
            if not all(explained.explains(value, places) for value in values):
                return node
    return None


def _is_norm(node: fx.Node) -> bool:
    """Whether a node is a norm of what was looked at, which is a number of one rank alone."""
    return node.target is torch.ops.aten.linalg_vector_norm.default


def _sources(read: Read, ends: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that some nodes come from, with those that write to memory that these read."""
    found: set[fx.Node] = set()
    rest = list(ends)
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += [*node.all_input_nodes, *(one for one in read.writers.get(node, ()))]
    return found


def why_unknown(node: fx.Node, values: Sequence[Value]) -> str:
    """Return why nothing is known of what a node makes; "" if something is."""
    heads = (x.term.head for value in values for piece in value.pieces for x in piece.sum)
    return next((h[3] for h in heads if isinstance(h, tuple) and h[0] == UNKNOWN and h[2] == node.name), "")
