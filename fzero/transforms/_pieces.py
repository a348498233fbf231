"""Which elements of this rank's flats belong to which leaf: what an optimizer is told."""

from __future__ import annotations

from fzero.optim import Piece
from fzero.state import Layout, Placement, Setup


def pieces_of(setup: Setup) -> list[Piece]:
    """Which elements of this rank's shards are of which leaf; padding goes with its neighbour."""
    layout = setup.layout
    sharded = setup.optimizer_state is Placement.SHARDED
    found = []
    for number, index in enumerate(layout.trainable):
        group = layout.groups[index]
        numel = group.shard_numel if sharded else layout.full_numel(index)
        start = setup.axis.rank * numel if sharded else 0
        pieces = _pieces_of(layout, index, number, start, numel)
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
