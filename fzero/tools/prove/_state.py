"""The tensors of a state, leaf by leaf: what the inputs of a program are, and where leaves come out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, fx

from fzero.state import Setup
from fzero.tools.prove._terms import Piece, Sum, Terms, Value, cut, joined, numel_of, of_term, whole
from fzero.tools.trace.program import RecordedStep

_OF_STATE = re.compile(r"^(state.*?)\.(params|gradients|optimizer|window|step|scale)\b")
_FLATS = re.compile(r"^(.*\.(?:params|gradients)\.flats)\[(\d+)\]$")
_INDEXED = re.compile(r"^(.*)\[(\d+)\]$")


class Place(NamedTuple):
    """What one tensor of a state is: the flat of a group, or a tensor of its own.

    kind: where it is, without the number of the group: "state.optimizer.moments[0]".
    """

    kind: str
    setup: Setup | None = None
    group: int = -1
    spread: bool = False


def places_of(program: RecordedStep, paths: Sequence[str], nodes: Sequence[fx.Node]) -> list[Place]:
    """Return the place of each tensor of a state, or of an argument."""
    heads = dict.fromkeys(m[1] for path in program.inputs if (m := _OF_STATE.match(path)))
    setups = dict(zip(heads, (one.setup for one in program.states), strict=True))
    return [_place(path, node, setups) for path, node in zip(paths, nodes, strict=True)]


def _place(path: str, node: fx.Node, setups: dict[str, Setup]) -> Place:
    state, val = _OF_STATE.match(path), node.meta.get("val")
    if state is None or not isinstance(val, Tensor):
        return Place(path)
    setup, shape = setups[state[1]], tuple(val.shape)
    flat = _FLATS.match(path)
    indexed = _INDEXED.match(path)
    if flat is not None and state[2] == "params":
        kind, group, placement = flat[1], int(flat[2]), setup.params
    elif indexed is not None and len(shape) == 1 and int(indexed[2]) < len(setup.layout.trainable):
        kind, group = indexed[1], setup.layout.trainable[int(indexed[2])]
        placement = setup.optimizer_state
    else:
        return Place(path)
    if shape != (setup.numel(group, placement),):
        return Place(path)
    return Place(kind, setup, group, spread=setup.part(placement, 0).count > 1)


def input_value(terms: Terms, place: Place, node: fx.Node) -> Value:
    """Return what an input is: leaves with padding between them, of which nothing is known."""
    shape = tuple(node.meta["val"].shape)
    if place.setup is None:
        of_rank = not place.kind.startswith("state")
        return of_term(terms.term(place.kind, numel=numel_of(shape), varies=of_rank), shape)
    layout = place.setup.layout
    pieces, at = [], 0
    for path, start, numel in leaves_of_group(place):
        pieces += [Piece(start - at, _padding(terms, place, at, start - at))]
        pieces += [Piece(numel, whole(terms.term((place.kind, path), numel=numel)))]
        at = start + numel
    rest = layout.full_numel(place.group) - at
    pieces += [Piece(rest, _padding(terms, place, at, rest))]
    return Value(shape, joined(pieces), place.spread)


def _padding(terms: Terms, place: Place, at: int, numel: int) -> Sum:
    return whole(terms.term(("padding", place.kind, place.group, at), numel=numel))


def leaves_of_group(place: Place) -> Iterator[tuple[str, int, int]]:
    """Return (path, where it starts in the full flat, its elements) of each leaf of a group."""
    assert place.setup is not None
    layout = place.setup.layout
    group = layout.groups[place.group]
    for i, start in sorted(zip(group.leaves, group.offsets, strict=True), key=lambda x: x[1]):
        yield layout.leaves[i].path, start, layout.leaves[i].numel


Key = tuple[str, str]
"""(kind, path of the leaf), or (path of the tensor, "")."""


def keys_of(place: Place) -> list[Key]:
    """Return the keys of what is in a tensor of a state: its leaves, or itself."""
    if place.setup is None:
        return [(place.kind, "")]
    return [(place.kind, path) for path, _, _ in leaves_of_group(place)]


def outputs_by_leaf(places: Sequence[Place], values: Sequence[Value]) -> dict[Key, Value | None]:
    """Return the elements of each leaf in the outputs; None where they are on other ranks."""
    found: dict[Key, Value | None] = {}
    for place, value in zip(places, values, strict=True):
        if place.setup is None and value.numel:
            found[place.kind, ""] = value
        for path, start, numel in leaves_of_group(place) if place.setup is not None else ():
            pieces = cut(value.pieces, start, numel)
            fits = value.spread == place.spread
            found[place.kind, path] = Value((numel,), pieces) if fits else None
    return found
