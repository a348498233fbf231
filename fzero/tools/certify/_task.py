"""The computation of a cell: its counts, its precision and its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.machine.codecs import bf16
from fzero.machine.encode import coarseness
from fzero.state.codec import Codec
from fzero.tools.certify._axes import RunDtypes


class Wire(NamedTuple):
    """By which codec gradients cross ranks, and how many times they are encoded on their way."""

    codec: Codec
    times: int

    @property
    def casts(self) -> bool:
        """Whether it is bf16 alone, whose rounding is known as that of a dtype."""
        return isinstance(self.codec, bf16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The computation of a cell, for one process and for the ranks."""

    world: int  # the ranks that read other batches
    pieces: int  # in which a batch is cut, each for a rank of its own
    micro_batches: int
    updates: int
    precision: RunDtypes
    wire: Wire | None  # None: gradients cross ranks as they are
    sums: bool  # over ranks; else the mean
    ragged: bool  # micro-batches have weights, and their losses are not divided by their number
    whole_loss: bool  # autocast is around the loss, not around the module's forward alone
    steps_unused: bool  # what no rank has used is stepped by zeros, as JAX does and torch does not

    @property
    def summands(self) -> int:
        """How many gradients one update is made of: those of whole batches."""
        return self.world * self.micro_batches

    @property
    def divisor(self) -> float:
        """What their sum is divided by.

        That of a whole batch is the mean over the ranks that have its pieces: their sum is so many
        times it.
        """
        if self.ragged:
            return sum(self.weights)
        return self.micro_batches / self.pieces if self.sums else self.summands

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.world * self.pieces

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
        return torch.bfloat16 if self.wire and self.wire.casts else self.precision.low

    @property
    def loses(self) -> float:
        """What encoding may lose of a gradient, in units of the largest of all; 0 for a dtype."""
        if self.wire is None or self.ranks == 1 or self.wire.casts:
            return 0.0
        return coarseness(self.wire.codec) * self.wire.times

    @property
    def remembers(self) -> bool:
        """Whether the next update has back what encoding has lost."""
        return self.wire is not None and self.wire.codec.memory is not False

    def numbers(self, update: int) -> list[list[int]]:
        """[W][N]: the batches of an update."""
        ranks, counts = range(self.world), range(self.micro_batches)
        return [[self.batch_number(update, rank, n) for n in counts] for rank in ranks]

    def batch_number(self, update: int, rank: int, micro_batch: int) -> int:
        """Return the number of a rank's batch, which no other rank or micro-batch takes."""
        return (update * self.world + rank) * self.micro_batches + micro_batch
