"""Tell an optimizer which elements of this rank's flats belong to which leaf."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fzero.optim import Piece
from fzero.state import Layout, Setup
from fzero.state.layout import Part


def pieces_of(setup: Setup) -> tuple[Piece, ...]:
    """Which elements of this rank's parts are of which leaf; padding goes with its neighbour."""
    return _pieces_of(setup.layout, setup.part(setup.optimizer_state, setup.axis.rank))


@lru_cache(maxsize=64)  # every step asks for the same ones
def _pieces_of(layout: Layout, part: Part) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for number, index in enumerate(layout.trainable):
        # A flat of padding alone has an empty piece, which says whose it is.
        nothing = Piece(number, layout.leaves[layout.groups[index].leaves[0]], 0, 0)
        found.extend([*_in_group(layout, index, number, part)] or [nothing])
    return tuple(found)


def _in_group(layout: Layout, index: int, number: int, part: Part) -> Iterator[Piece]:
    group, numel = layout.groups[index], layout.full_numel(index) // part.count
    start = part.index * numel
    begins, ends = (0, *group.offsets[1:]), (*group.offsets[1:], layout.full_numel(index))
    for leaf, begin, end in zip(group.leaves, begins, ends, strict=True):
        low, high = max(begin - start, 0), min(end - start, numel)
        if low < high:
            yield Piece(number, layout.leaves[leaf], low, high, max(start - begin, 0))
