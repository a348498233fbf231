"""The inputs and outputs of a recorded program: which leaves are where in its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from fzero.state import Setup, TrainState
from fzero.tools.prove._terms import Stretch, Symbolic, Terms, cut, joined, of_term, whole
from fzero.tools.trace.program import FIELD, RecordedStep


class BufferPlace(NamedTuple):
    """What a tensor of a state is: the flat of a group, whole or spread; or a tensor of its own.

    kind: its path, without the number of the group.
    """

    kind: str
    setup: Setup | None = None
    group: int = -1
    spread: bool = False

    @property
    def leaves(self) -> Iterator[tuple[str, int, int]]:
        """(path, where it starts in the full flat, its elements) of each leaf of the group."""
        if self.setup is None:
            return
        layout, group = self.setup.layout, self.setup.layout.groups[self.group]
        for i, start in zip(group.leaves, group.offsets, strict=True):
            if layout.leaves[i].numel:
                yield layout.leaves[i].path, start, layout.leaves[i].numel

    @property
    def keys(self) -> list[Key]:
        """Of what is in it."""
        return [(self.kind, path) for path, _, _ in self.leaves] or [(self.kind, "")]


Key = tuple[str, str]
"""(kind, path of a leaf), or (path of a tensor of the state, "")."""


def places_of(
    program: RecordedStep, paths: Sequence[str], nodes: Sequence[fx.Node]
) -> list[BufferPlace]:
    """Return the place of each tensor of a state, or of an argument."""
    states = dict(zip(program.setups, program.states, strict=True))
    return [_place(path, node, states) for path, node in zip(paths, nodes, strict=True)]


_SLOT = re.compile(r"^(state.*?)\.slots\[(['\"])(.*?)\2\]\.value\.flats\[\d+\]$")


def _place(path: str, node: fx.Node, states: Mapping[str, TrainState]) -> BufferPlace:
    state, indexed = _SLOT.match(path) or FIELD.match(path), re.match(r"^(.*)\[(\d+)\]$", path)
    shape = getattr(node.meta.get("val"), "shape", ())
    if state is None or indexed is None or len(shape) != 1 or not shape[0]:
        return BufferPlace(path)
    setup, every, placement = states[state[1]].setup, state[2] == "params", None
    if state.re is _SLOT:
        slot = states[state[1]].slots[state[3]]
        every, placement = slot.form.leaves == "all", slot.value.placement
    groups = range(len(setup.layout.groups)) if every else setup.layout.trainable
    placement = placement or (setup.params if every else setup.optimizer_state)
    at = int(indexed[2])
    if at >= len(groups) or shape[0] != setup.numel(groups[at], placement):
        return BufferPlace(path)
    return BufferPlace(indexed[1], setup, groups[at], setup.part(placement, 0).count > 1)


def input_value(terms: Terms, place: BufferPlace, node: fx.Node) -> Symbolic:
    """Return what an input is: leaves, and padding between them of which nothing is known."""
    shape = tuple(node.meta["val"].shape)
    if place.setup is None:
        varies = not place.kind.startswith("state")
        numel = torch.Size(shape).numel()
        return of_term(terms.term(place.kind, (), numel, varies=varies), shape)
    pieces, at = [], 0
    end = "", place.setup.layout.full_numel(place.group), 0
    for path, start, numel in [*sorted(place.leaves, key=lambda leaf: leaf[1]), end]:
        padding = terms.term(("padding", place.kind, place.group, at), (), start - at)
        pieces.append(Stretch(start - at, whole(padding)))
        pieces.append(Stretch(numel, whole(terms.term((place.kind, path), (), numel))))
        at = start + numel
    return Symbolic(shape, joined(pieces), place.spread)


def outputs_by_leaf(
    places: Sequence[BufferPlace], values: Sequence[Symbolic]
) -> dict[Key, Symbolic | None]:
    """Return the elements of each leaf in the outputs; None where other ranks have them."""
    found: dict[Key, Symbolic | None] = {}
    for place, value in zip(places, values, strict=True):
        if place.setup is None and value.numel:
            found[place.kind, ""] = None if value.spread else value
        for path, start, numel in place.leaves:
            part = Symbolic((numel,), cut(value.pieces, start, numel))
            found[place.kind, path] = part if value.spread == place.spread else None
    return found
