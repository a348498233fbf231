"""Which elements of this rank's flats belong to which leaf: what an optimizer is told."""

from __future__ import annotations

from fzero.optim import Piece
from fzero.state import Layout, Setup


def pieces_of(setup: Setup) -> list[Piece]:
    """Which elements of this rank's parts are of which leaf; padding goes with its neighbour."""
    layout, placement = setup.layout, setup.optimizer_state
    part = setup.part(placement, setup.axis.rank)
    found = []
    for number, index in enumerate(layout.trainable):
        group = layout.groups[index]
        numel = setup.numel(index, placement)
        pieces = _pieces_of(layout, index, number, part.index * numel, numel)
        # A flat of padding alone has an empty piece, which says whose it is.
        found.extend(pieces or [Piece(number, layout.leaves[group.leaves[0]], 0, 0)])
    return found


def _pieces_of(layout: Layout, index: int, number: int, start: int, numel: int) -> list[Piece]:
    group = layout.groups[index]
    bounds = [*group.offsets[1:], layout.full_numel(index)]
    begins = [0, *group.offsets[1:]]
    pieces = []
    for leaf, begin, end in zip(group.leaves, begins, bounds, strict=True):
        low, high = max(begin - start, 0), min(end - start, numel)
        if low < high:
            first = max(start - begin, 0)
            pieces.append(Piece(number, layout.leaves[leaf], low, high, first))
    return pieces
