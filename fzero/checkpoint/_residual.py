"""What quantized reductions have lost so far, the residual e_r of each rank, in a checkpoint.

Updates depend only on the sum over ranks, sum_r e_r. A load on as many ranks as saved gives each
rank its own residual, so training goes on with the same bits. On another number of ranks each rank
gets its shard of the sum, and zeros elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fzero.checkpoint._pieces import OwnShard
from fzero.checkpoint.manifest import Manifest
from fzero.machine.encode import residual_of
from fzero.machine.partition import shard_of
from fzero.state import Part, TrainState

Sums = list[tuple[Tensor, Tensor]]  # what is read is added to the first of each two


def residual_shards(state: TrainState, rank: int) -> list[OwnShard]:
    """Return all of a rank's residual, each flat [W l] as the shards of the ranks."""
    layout = state.setup.layout
    flats = state.window.residual.flats
    return [
        OwnShard(f"residual/{rank}", index, Part(layout.ranks, r), shard_of(flat, layout.ranks, r))
        for index, flat in zip(layout.trainable, flats, strict=False)  # there may be none
        for r in range(layout.ranks)
    ]


def with_residual(
    state: TrainState, saved: Manifest, rank: int
) -> tuple[TrainState, list[OwnShard], Sums]:
    """Return the state with an allocated residual, the tensors to read, what to add then."""
    residual, ranks = residual_of(state), saved.origin["ranks"]
    state = state.replace(window=replace(state.window, residual=residual))
    layout = state.setup.layout
    if not any(name.startswith("residual/") for name in saved.tensors):
        return state, [], []
    if ranks == layout.ranks:
        return state, residual_shards(state, rank), []
    shards: list[OwnShard] = []
    sums: Sums = []
    for index, flat in zip(layout.trainable, residual.flats, strict=False):
        own = shard_of(flat, layout.ranks, rank)
        for source in range(ranks):
            read = torch.zeros_like(own)
            shards.append(OwnShard(f"residual/{source}", index, Part(layout.ranks, rank), read))
            sums.append((own, read))
    return state, shards, sums
