"""One run up to one update: losses, gradients, parameters and slots of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.machine.by_path import leaf_paths
from fzero.state import Setup, TrainState
from fzero.tools.compare import Found, Spread
from fzero.tools.diff._difference import operation_of
from fzero.tools.diff._record import RankUpdate
from fzero.tools.diff._values import params_of, slots_of_ranks, spread


class Beside(NamedTuple):
    """All gradients of an update, in the order in which a backward makes them."""

    agree: tuple[str, ...]
    differ: tuple[str, ...]


class Apart(NamedTuple):
    """A difference in one update of one state."""

    operation: str
    path: str
    found: Found
    backward: int | None = None
    beside: Beside | None = None

    @property
    def kind(self) -> str:
        """The operation without the name of a slot, counter or module."""
        return operation_of(self.operation)


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots, for cached properties
class Side:
    """One run up to one update of one state: the state before, and the record of each rank."""

    before: Sequence[TrainState]
    seen: Sequence[RankUpdate]
    averages: bool  # losses and gradients over ranks; else they are summed

    @property
    def setup(self) -> Setup:
        """The setup of the state."""
        return self.before[0].setup

    @cached_property
    def divisor(self) -> float:
        """The divisor of a sum over ranks: their number, or the sum of all weights.

        With logical ranks the terms are those of logical ranks, whatever ranks carry them.
        """
        counts = [one.counts for seen in self.seen for one in seen.backwards]
        weights = [count for count in counts if count is not None]
        if weights:
            return sum(weights) or 1.0
        logical = self.setup.logical
        count = len(self.seen) if logical is None else logical.ranks
        return count if self.averages else 1

    def loss_terms(self) -> list[Tensor]:
        """Return the terms of the differentiated loss: of all ranks and backwards, weighted."""
        return [
            one.loss.double() * one.weight / self.divisor
            for seen in self.seen
            for one in seen.backwards
            if one.loss is not None
        ]

    @cached_property
    def gradient_terms(self) -> dict[str, list[Tensor]]:
        """For each leaf, the flat terms of its gradient: of all ranks and backwards."""
        names = leaf_paths(self.setup.layout)
        found: dict[str, list[Tensor]] = {}
        for seen in self.seen:
            for one in seen.backwards:
                for leaf, gradient in one.gradients.items():
                    found.setdefault(names[leaf], []).append(gradient.reshape(-1) / self.divisor)
        return found

    def gradients(self, given: bool) -> dict[str, Spread]:
        """Return the gradients of the update: as reduced, or if `given` as the optimizer got it."""
        setup = self.setup
        flats = [seen.given if given else seen.reduced for seen in self.seen]
        return spread(setup, setup.layout.trainable, flats, setup.gradients)

    @cached_property
    def after(self) -> list[TrainState]:
        """The state after the update, of the ranks that made one."""
        return [seen.after for seen in self.seen if seen.after is not None]

    @cached_property
    def corners(self) -> list[tuple[dict[str, Spread], dict[tuple[str, str], Spread]]]:
        """For each perturbation of gradients and slots: the added values, and the new slots."""
        setup, by_rank = self.setup, [seen.corners for seen in self.seen]
        placement, found = setup.optimizer_state, []
        for same in zip(*by_rank, strict=True):
            moved = spread(setup, setup.layout.trainable, [x.moved for x in same], placement)
            slots: dict[tuple[str, str], Spread] = {}
            for name, group in same[0].slots:
                flats = [[x.slots[name, group]] for x in same]
                cut = spread(setup, [group], flats, placement)
                slots.update({(name, path): one for path, one in cut.items()})
            found.append((moved, slots))
        return found

    @cached_property
    def params(self) -> tuple[dict[str, Spread], dict[str, Spread]]:
        """The parameters before the update, and after it."""
        return params_of(self.before), params_of(self.after) if self.after else {}

    @cached_property
    def slots(self) -> tuple[dict[tuple[str, str], Spread], dict[tuple[str, str], Spread]]:
        """The slots of the optimizer before the update, and after it."""
        return slots_of_ranks(self.before), slots_of_ranks(self.after) if self.after else {}


def summed(terms: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the sum in float64; zeros of `shape` if there is no term."""
    if not terms:
        return torch.zeros(tuple(shape), dtype=torch.float64)
    return torch.stack([term.double() for term in terms]).sum(0)
