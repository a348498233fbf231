"""The computation of a cell: its counts, its precision and its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fzero.tools.certify._axes import RunDtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The computation of a cell, for one process and for the ranks."""

    world: int
    micro_batches: int
    updates: int
    precision: RunDtypes
    wire: torch.dtype | None  # bf16 or int8, in which gradients cross ranks; None: their own
    sums: bool  # over ranks; else the mean
    ragged: bool  # micro-batches have weights, and their losses are not divided by their number
    whole_loss: bool  # autocast is around the loss, not around the module's forward alone
    steps_unused: bool  # what no rank has used is stepped by zeros, as JAX does and torch does not

    @property
    def summands(self) -> int:
        """How many gradients one update is made of."""
        return self.world * self.micro_batches

    @property
    def divisor(self) -> int:
        """What their sum is divided by."""
        if self.ragged:
            return sum(self.weights)
        return self.micro_batches if self.sums else self.summands

    @property
    def share(self) -> int:
        """What the loss of a micro-batch is divided by."""
        return 1 if self.ragged else self.micro_batches

    def weight(self, rank: int, micro_batch: int) -> int:
        """Return the weight of a micro-batch: 3, 1, 6, 4, 2, 0, 5 and so on."""
        return (5 * (rank * self.micro_batches + micro_batch) + 3) % 7 if self.ragged else 1

    @property
    def _places(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self.world), range(self.micro_batches))

    @property
    def weights(self) -> list[int]:
        """Those of all micro-batches, in the order of `numbers`."""
        return [self.weight(*at) for at in self._places]

    @property
    def low(self) -> torch.dtype:
        """The coarsest floating dtype that a gradient passes through."""
        return torch.bfloat16 if self.wire is torch.bfloat16 else self.precision.low

    @property
    def quantizes(self) -> bool:
        """Whether gradients cross ranks as int8 blocks."""
        return self.wire is torch.int8 and self.world > 1

    def numbers(self, update: int) -> list[list[int]]:
        """[W][N]: the batches of an update."""
        ranks, counts = range(self.world), range(self.micro_batches)
        return [[self.batch_number(update, rank, n) for n in counts] for rank in ranks]

    def batch_number(self, update: int, rank: int, micro_batch: int) -> int:
        """Return the number of a rank's batch, which no other rank or micro-batch takes."""
        return (update * self.world + rank) * self.micro_batches + micro_batch
