"""What quantized reductions have lost so far, the residual e_r of each rank, in a checkpoint.

Updates depend only on the sum over ranks, sum_r e_r. A load on as many ranks as saved gives each
rank its own residual, so training goes on with the same bits. On another number of ranks each rank
gets its shard of the sum, and zeros elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._manifest import Manifest
from fzero.checkpoint._pieces import OwnShard, Piece, pieces_of
from fzero.partition import shard_of
from fzero.quantize import residual_of
from fzero.state import Setup, TrainState


class Room(NamedTuple):
    """What is read of one group: this rank's own residual, [W l], or of each saved rank a shard."""

    group: int
    flats: tuple[Tensor, ...]


def residual_pieces(state: TrainState, flats: Sequence[Tensor], rank: int) -> list[Piece]:
    """Return all of a rank's residual, given as its flats [W l]."""
    setup = state.setup
    return [
        piece
        for index, flat in zip(setup.layout.trainable, flats, strict=False)  # there may be none
        for piece in _whole(setup, index, flat, rank)
    ]


def rooms_of(state: TrainState, saved: Manifest, rank: int) -> tuple[list[Room], list[Piece]]:
    """Return room for what a checkpoint has of a rank's residual, and the pieces to read."""
    layout, ranks = state.setup.layout, saved.origin["ranks"]
    rooms: list[Room] = []
    pieces: list[Piece] = []
    has_residual = any(name.startswith("residual/") for name in saved.tensors)
    if not has_residual or not state.setup.quantizes_gradients:
        return rooms, pieces
    for index, own in zip(layout.trainable, residual_of(state).flats, strict=True):
        if ranks == layout.ranks:
            flat = torch.zeros_like(own)
            rooms.append(Room(index, (flat,)))
            pieces += _whole(state.setup, index, flat, rank)
            continue
        parts = [own.new_zeros(layout.groups[index].shard_numel) for _ in range(ranks)]
        rooms.append(Room(index, tuple(parts)))
        for source, part in enumerate(parts):
            shard = OwnShard(f"residual/{source}", index, part)
            pieces += pieces_of(state.setup, [shard], rank)
    return rooms, pieces


def with_residual(state: TrainState, rooms: list[Room], rank: int) -> TrainState:
    """Return an idle state with the residual that was read; of zeros if there was none."""
    layout, residual = state.setup.layout, residual_of(state)
    for room in rooms:
        flat = residual.flats[layout.trainable.index(room.group)]
        whole = len(room.flats) == 1 and room.flats[0].numel() == flat.numel()
        target = flat if whole else shard_of(flat, layout.ranks, rank)
        for part in room.flats:
            target += part
    return state.replace(window=replace(state.window, residual=residual))


def _whole(setup: Setup, index: int, flat: Tensor, rank: int) -> list[Piece]:
    """The pieces of a rank's own flat [W l]."""
    ranks, prefix = setup.layout.ranks, f"residual/{rank}"
    return [
        piece
        for r in range(ranks)
        for piece in pieces_of(setup, [OwnShard(prefix, index, shard_of(flat, ranks, r))], r)
    ]
