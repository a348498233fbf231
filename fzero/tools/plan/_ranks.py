"""Elements of parameters, and of padding, in each rank's shards, computed from the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.state import Placement, Setup


class RankShare(NamedTuple):
    """The elements that one rank holds, without and with padding."""

    rank: int
    params: int  # elements of parameters
    params_padding: int
    updated: int  # of trainable ones, for which it has gradients and optimizer states
    updated_padding: int

    @property
    def is_empty(self) -> bool:
        """Whether this rank updates nothing: its trainable part is all padding."""
        return self.updated == 0


def shares_of(setups: Sequence[Setup]) -> tuple[RankShare, ...]:
    """Return the share of each rank, in rank order, summed over several states."""
    world = setups[0].axis.size
    held = torch.zeros(4, world, dtype=torch.int64, device="cpu")
    for setup in setups:
        every = range(len(setup.layout.groups))
        held[:2] += _of(setup, every, setup.params)
        held[2:] += _of(setup, setup.layout.trainable, setup.optimizer_state)
    columns = held.t().tolist()
    return tuple(RankShare(rank, *column) for rank, column in enumerate(columns))


def _of(setup: Setup, groups: Sequence[int], placement: Placement) -> Tensor:
    """Return [2, W]: elements of parameters, and of padding, in each rank's part of some groups."""
    parts = [setup.part(placement, rank).index for rank in range(setup.axis.size)]
    index = torch.tensor(parts, dtype=torch.int64, device="cpu")
    real = torch.zeros(setup.axis.size, dtype=torch.int64, device="cpu")
    total = 0
    for i in groups:
        length = setup.numel(i, placement)
        total += length
        group, leaves = setup.layout.groups[i], setup.layout.leaves
        starts = torch.tensor(group.offsets, dtype=torch.int64, device="cpu")[:, None]
        numels = torch.tensor([leaves[j].numel for j in group.leaves], device="cpu")[:, None]
        # A leaf has min(max(x - start, 0), numel) of its elements before position x of the flat.
        before = ((index * length) - starts).clamp(min=0).minimum(numels)
        after = ((index + 1) * length - starts).clamp(min=0).minimum(numels)
        real += (after - before).sum(0)
    return torch.stack([real, total - real])
