"""Gradients of leaves -> buckets -> collectives that run beside the backward -> this rank's shard.

    add(state, leaf, gradient)      autograd made one
      the bucket is full            pack -> [W l] in the dtype of the wire
      it may start                  reduce-scatter (or all-reduce), at most two at a time; of
                                    int8 blocks an all-to-all, and the sum is made here
      it is over                    on a mesh of two dims: then across replicas, beside the next one
    all of it is over             / W, unless packing did -> means, in the dtype of their sums

A bucket is one group below stage 3; at stage 3 it is a unit, whose parameters are gathered
together. The `Sequencer` says which one may start, in one order on every rank, so ranks may use
other parameters, or use them in another order.

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3 (buckets in one order).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fzero._modes import is_recorded
from fzero.bucket import Bucket
from fzero.collectives import InFlight, about, start_all_to_all, start_reduce, start_scatter
from fzero.errors import AxisError
from fzero.homes import add_to, lent, placed
from fzero.mesh import Axis, Runtime
from fzero.quantize import ErrorFeedback
from fzero.state.buffers import Placement
from fzero.state.layout import as_bits
from fzero.state.progress import ALL
from fzero.state.setup import Setup

IN_FLIGHT = 1
"""Reduce-scatters that run at once: with the bucket that fills up, the inputs of two are alive, as
in FSDP2. All-reduces run in place, in memory that the gradient needs anyway: they have no bound."""


class Reducer:
    """The gradients of some states on the same ranks, for one backward after another.

    `means[state][group]` are the means over ranks that are there. Gradients of a state that `keeps`
    stay on this rank, for a coalescing window: see `pop_local`.
    """

    def __init__(
        self, setups: Sequence[Setup], axes: Sequence[Axis], devices: Sequence[torch.device]
    ) -> None:
        self.setups, self.axes, self._devices = setups, axes, devices  # of each state
        self.keeps = [False for _ in setups]
        self.on_full: Callable[[int], None] = self.start  # set by the sequencer of a pass
        self.means: list[dict[int, Tensor]] = [{} for _ in setups]
        self.received = 0  # gradients of leaves since `begin`
        self._used: list[set[int]] = [set() for _ in setups]  # those leaves
        self._buckets: list[dict[int, Bucket]] = []
        self._units: list[tuple[int, tuple[int, ...]]] = []  # (state, its groups that learn)
        self._where: list[dict[int, tuple[int, Bucket, int]]] = []
        for number, setup in enumerate(setups):
            self._add(number, setup)
        self._flights: deque[tuple[int, InFlight]] = deque()
        self._across: deque[tuple[int, InFlight]] = deque()  # of one bucket, across replicas
        streams = any(setup.streams for setup in setups)
        self._stays = axes[0].runtime is Runtime.LOCAL and not streams
        self.feedback = [ErrorFeedback(s) if s.quantizes_gradients else None for s in setups]

    def _add(self, number: int, setup: Setup) -> None:
        layout = setup.layout
        buckets = {
            i: Bucket(layout, i, contiguous=setup.reduction.contiguous_gradients)
            for i in layout.trainable
        }
        where: dict[int, tuple[int, Bucket, int]] = {}
        for unit in layout.units:
            learning = tuple(i for i in unit if i in buckets)
            for i in learning:
                for position, leaf in enumerate(layout.groups[i].leaves):
                    where[leaf] = len(self._units), buckets[i], position
            self._units.append((number, learning))
        self._buckets.append(buckets)
        self._where.append(where)

    # Events.

    def hook(self, state: int, leaf: int) -> Callable[[Tensor], None]:
        """Return a hook for a leaf: takes its gradient as soon as autograd has made it."""

        def on_gradient(p: Tensor) -> None:
            if p.grad is not None:
                self.pop_grad(state, leaf, p)

        return on_gradient

    def pop_grad(self, state: int, leaf: int, p: Tensor) -> None:
        """Add `p.grad`, the gradient of one leaf of a state, and take it away from `p`."""
        unit, bucket, position = self._where[state][leaf]
        bucket.add(position, _popped(p))
        self._used[state].add(leaf)
        self._received(unit, bucket)

    def add(self, state: int, leaf: int, gradient: Tensor) -> None:
        """Add the gradient of one leaf of a state."""
        unit, bucket, position = self._where[state][leaf]
        bucket.add(position, gradient)
        self._used[state].add(leaf)
        self._received(unit, bucket)

    def _received(self, unit: int, bucket: Bucket) -> None:
        self.received += 1
        state, indices = self._units[unit]
        if self._stays or self.keeps[state] or not bucket.is_full:
            return
        if len(indices) == 1 or self.is_complete(unit):
            self.on_full(unit)

    def is_bounded(self, unit: int) -> bool:
        """Whether the inputs of few reductions may be alive at once: those of reduce-scatters."""
        return not self.setups[self._units[unit][0]].reduces_in_place

    # Collectives.

    def start(self, unit: int, *, mine: bool = True) -> None:
        """Start the reduction of a unit, with zeros where this rank has nothing. A collective.

        Not `mine`: another rank asked for it, and what this rank has of it stays here.
        """
        state, indices = self._units[unit]
        if not indices or (mine and self.keeps[state]):
            return
        setup, sharded = self.setups[state], self.is_bounded(unit)
        while sharded and len(self._flights) >= IN_FLIGHT:
            self._wait_for_oldest()
        local = [self._sent(state, i, mine=mine) for i in indices]
        ordered = setup.reduction.ordered
        with about(lambda: setup.layout.paths(indices)):
            if setup.quantizes_gradients:
                flight = start_all_to_all(local, self.axes[state])
            elif sharded:
                flight = start_scatter(local, self.axes[state].shards, ordered=ordered)
            else:
                flight = start_reduce(local, self.axes[state], ordered=ordered)
        self._flights.append((unit, flight))
        if not setup.reduction.overlap:
            self.wait_all()

    def _sent(self, state: int, index: int, *, mine: bool) -> Tensor:
        """What this rank puts on the wire for one group: zeros if it is not `mine`, or none."""
        setup, feedback, device = self.setups[state], self.feedback[state], self._devices[state]
        gradient = self._popped_flat(state, index) if mine else None
        if gradient is not None:
            gradient = lent(gradient, device)
        if feedback is not None:
            return feedback.sent(index, gradient) if mine else feedback.nothing(index, device)
        if gradient is not None:
            return setup.sent(index, gradient)
        dtype = setup.communication_dtype(index)
        return torch.zeros(setup.layout.full_numel(index), dtype=dtype, device=device)

    def _popped_flat(self, state: int, index: int) -> Tensor | None:
        setup, bucket = self.setups[state], self._buckets[state][index]
        if _in_place(setup):
            return bucket.pop_owned(setup.divides_first(index))
        return bucket.pop()

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduction; across the replicas it goes on beside the next one."""
        # In the order of the starts: what is waited for may communicate again.
        self._wait_across()
        unit, flight = self._flights.popleft()
        state, indices = self._units[unit]
        setup, axis = self.setups[state], self.axes[state]
        if axis.dims is None or not self.is_bounded(unit):
            self._add_mean(unit, flight)
            return
        over_all = setup.gradients is Placement.OVER_ALL
        start = start_scatter if over_all else start_reduce
        summed = flight.wait()
        with about(lambda: setup.layout.paths(indices)):
            crossing = start(summed, axis.replicas, ordered=setup.reduction.ordered)
        self._across.append((unit, crossing))

    def _wait_across(self) -> None:
        while self._across:
            self._add_mean(*self._across.popleft())

    def _add_mean(self, unit: int, flight: InFlight) -> None:
        """Wait for a reduction, and add its mean to those before."""
        state, indices = self._units[unit]
        means, setup, feedback = self.means[state], self.setups[state], self.feedback[state]
        for index, got in zip(indices, flight.wait(), strict=True):
            summed = got if feedback is None else feedback.summed(index, got)
            mean = summed.to(setup.accumulate_dtype(index))
            first = setup.divides_first(index) if _in_place(setup) else 1.0
            if (divisor := setup.divisor / first) != 1.0:
                mean.div_(divisor)
            if index in means:
                add_to(means[index], mean)
            else:
                means[index] = placed(setup.offload.gradients, mean, setup.offload)

    # The end of a backward.

    def add_waiting(self, state: int, flats: dict[int, Tensor], *, owned: bool = False) -> None:
        """Take whole local gradients of a state, {group: [W l]}: what has waited in a window.

        They are written to only if they are `owned`.
        """
        for index, flat in flats.items():
            self._buckets[state][index].add_waiting(flat, owned=owned)

    def wait_all(self) -> None:
        """Wait for all that was started. All ranks are at one place."""
        while self._flights:
            self._wait_for_oldest()
        self._wait_across()

    def unreduced(self) -> list[int]:
        """The units with gradients that have not been handed on."""
        return [
            unit
            for unit, (state, indices) in enumerate(self._units)
            if not self.keeps[state] and any(self._buckets[state][i].has_any for i in indices)
        ]

    def is_complete(self, unit: int) -> bool:
        """Whether all of a unit's gradients are here; `on_full` was called for it then."""
        state, indices = self._units[unit]
        return all(self._buckets[state][i].is_full for i in indices)

    def pop_local(self, state: int, *, to_write: bool = False) -> dict[int, Tensor]:
        """Return, and forget, this rank's own gradients that are still here: {group: [W l]}.

        `to_write`: later gradients are added to them in place.
        """
        setup, written = self.setups[state], set[int]() if to_write else None
        found = {}
        for index, bucket in self._buckets[state].items():
            flat = bucket.pop(written)
            if flat is not None:
                found[index] = flat.to(setup.accumulate_dtype(index))
        return found

    def has_local(self, state: int) -> bool:
        """Whether any of this rank's own gradients are still here."""
        return any(bucket.has_any for bucket in self._buckets[state].values())

    def pop_local_into(self, state: int, totals: dict[int, Tensor], factor: float) -> None:
        """Add `pop_local(state)`, times a factor, to {group: [W l]}, without a copy between."""
        for index, total in totals.items():
            self._buckets[state][index].pop_into(total, factor)

    def pop_means(self, state: int) -> dict[int, Tensor]:
        """Return, and forget, the means of a state."""
        means, self.means[state] = self.means[state], {}
        return means

    def pop_used(self, state: int) -> int:
        """Return, and forget, the leaves of a state that got a gradient, as bits; `ALL` if all."""
        used, self._used[state] = self._used[state], set()
        return ALL if len(used) == len(self._where[state]) else as_bits(used)

    def begin(self, keeps: Sequence[bool]) -> None:
        """A backward begins: gradients of the states that `keeps` stay on this rank."""
        self.keeps, self.received = list(keeps), 0

    @property
    def backwards(self) -> Sequence[int]:
        """The units in the order in which a backward completes them, nearly: the last one first."""
        return range(len(self._units) - 1, -1, -1)

    def discard_local(self) -> None:
        """Discard what this backward has brought and no reduction has. Waits for nothing."""
        self.received = 0
        for state in range(len(self.setups)):
            self.pop_local(state)
            self._used[state].clear()

    def discard(self) -> None:
        """Discard what this backward has brought. Waits for what was started."""
        self.discard_local()
        while self._flights or self._across:
            with suppress(AxisError):
                self.wait_all()
        self.means = [{} for _ in self.setups]
        for feedback in filter(None, self.feedback):
            feedback.changed()


def _in_place(setup: Setup) -> bool:
    """Whether gradients are summed in the memory that is sent.

    In a graph none are, and what divides them after the sum is compiled into the update.
    """
    return setup.reduces_in_place and not is_recorded(())


def _popped(p: Tensor) -> Tensor:
    """Take `p.grad` away. No frame keeps it: a bucket's gradients go as soon as it is packed."""
    gradient, p.grad = p.grad, None
    assert gradient is not None
    return gradient.detach() if gradient.requires_grad else gradient
