"""Gradients of leaves -> buckets -> collectives that run beside the backward -> this rank's shard.

    pop_grad(state, leaf, p)        autograd made one
      the bucket is full            pack -> [W l] in the dtype of the wire
      it may start                  the first collective of its route, at most two at a time:
                                    reduce-scatter or all-reduce; all-to-all if it is encoded
      it is over                    the next of its route (on a mesh of two dims across replicas;
                                    an encoded sum on its way back), beside the next bucket
    all of it is over             / W, unless packing did -> means, in the dtype of their sums

A bucket is one group below stage 3; at stage 3 it is a unit, whose parameters are gathered
together. The protocol says which one may start, in one order on every rank, so ranks may use other
parameters, or use them in another order.

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3 (buckets in one order).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fzero.collectives import InFlight, about
from fzero.context.here import is_abstract
from fzero.errors import AxisError
from fzero.machine.factors import GradientEncoder
from fzero.machine.local_gradients import LocalGradients
from fzero.machine.route import ReductionPlan
from fzero.ranks.mesh import Runtime
from fzero.state.setup import Setup

IN_FLIGHT = 1
"""Reduce-scatters that run at once: with the bucket that fills up, the inputs of two are alive, as
in FSDP2. All-reduces run in place, in memory that the gradient needs anyway: they have no bound."""


class Reducer:
    """The gradients of some states on the same ranks, for one backward after another.

    on_full: called with a unit whose gradients are complete; default: it is reduced. `received`
    counts the gradients of leaves since `begin`.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        devices: Sequence[torch.device],
        on_full: Callable[[int], None] | None = None,
    ) -> None:
        self.plan, self._units = plan, plan.units
        of_state = zip(plan.setups, plan.axes, plan.routes, devices, strict=True)
        self.states = [LocalGradients(*one) for one in of_state]
        self.received = 0
        self._flights: deque[tuple[int, InFlight]] = deque()
        self._rest: deque[tuple[int, int, InFlight]] = deque()  # of one bucket, with its hop
        self._on_full = None if plan.alone else (on_full or self.start)

    # Events.

    def pop_grad(
        self,
        state: int,
        leaf: int,
        p: Tensor,
        times: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> None:
        """Add `p.grad`, the gradient of one leaf of a state, and take it away from `p`.

        times: what makes w g of a gradient, in the dtype in which gradients add up.
        """
        unit, index, position = self.plan.where[state][leaf]
        one = self.states[state]
        if times is None:
            one.add(leaf, index, position, _popped(p))
        else:
            one.add(leaf, index, position, times(_popped(p), one.setup.accumulate_dtype(index)))
        self._received(state, unit, index)

    def _received(self, state: int, unit: int, index: int) -> None:
        self.received += 1
        one = self.states[state]
        if self._on_full is None or one.keeps or not one.buckets[index].is_full:
            return
        if len(self._units[unit][1]) == 1 or self.is_complete(unit):
            self._on_full(unit)

    def begin(self, states: Sequence[tuple[Setup, bool]]) -> None:
        """A backward begins. For each state: its setup, and whether gradients stay on this rank."""
        self.settle()
        for one, (setup, keeps) in zip(self.states, states, strict=True):
            one.begin(setup, keeps=keeps)

    def settle(self) -> None:
        """What was received is in a state: count again."""
        self.received = 0

    # Collectives.

    @property
    def unit_count(self) -> int:
        """How many units there are, also those of which nothing learns."""
        return len(self._units)

    def start(self, unit: int, *, mine: bool = True) -> None:
        """Start the reduction of a unit, with zeros where this rank has nothing. A collective.

        Not `mine`: another rank asked for it, and what this rank has of it stays here.
        """
        number, indices = self._units[unit]
        one = self.states[number]
        if not indices or (mine and one.keeps):
            return
        while self.plan.bounded[unit] and len(self._flights) >= IN_FLIGHT:
            self._wait_for_oldest()
        local = [one.sent(i, mine=mine) for i in indices]
        with about(lambda: one.setup.layout.paths(indices)):
            flight = one.route[0].started(local, indices)
        self._flights.append((unit, flight))
        if not one.setup.reduction.overlap:
            self.wait_all()

    @property
    def starts_at_once(self) -> bool:
        """Whether the next reduction would start, and this rank go on, without a wait."""
        if waits_in_step(self.plan):
            return False
        flights = [flight for _, flight in self._flights] + [one for *_, one in self._rest]
        return all(flight.is_over for flight in flights)

    def _wait_for_oldest(self) -> None:
        """Wait for the first hop of the oldest reduction; its others go on beside the next one."""
        # In the order of the starts: what is waited for may communicate again.
        self._wait_for_rest()
        unit, flight = self._flights.popleft()
        self._go_on(unit, 0, flight)

    def _wait_for_rest(self) -> None:
        while self._rest:
            self._go_on(*self._rest.popleft())

    def _go_on(self, unit: int, hop: int, flight: InFlight) -> None:
        """Wait for one collective of a route, and start the next; after the last add the sums."""
        number, indices = self._units[unit]
        one, received = self.states[number], flight.wait()
        if hop + 1 == len(one.route):
            for index, got in zip(indices, received, strict=True):
                one.add_sum(index, got)
            return
        after = one.route[hop + 1]
        if after.sent is not None:
            received = [after.sent(i, got) for i, got in zip(indices, received, strict=True)]
        with about(lambda: one.setup.layout.paths(indices)):
            self._rest.append((unit, hop + 1, after.started(received, indices)))

    def wait_all(self) -> None:
        """Wait for all that was started. All ranks are at one place."""
        while self._flights:
            self._wait_for_oldest()
        self._wait_for_rest()

    # The end of a backward.

    def encoder(self, state: int) -> GradientEncoder | None:
        """What encodes a state's gradients where they cross ranks."""
        return self.states[state].encoder

    def add_waiting(self, state: int, flats: dict[int, Tensor], *, owned: bool = False) -> None:
        """Take whole local gradients of a state, {group: [W l]}: what has waited in a window.

        They are written to only if they are `owned`.
        """
        for index, flat in flats.items():
            self.states[state].buckets[index].add_waiting(flat, owned=owned)

    def unreduced(self) -> tuple[tuple[int, bool], ...]:
        """(unit, whether they are complete) of units with gradients that were not handed on."""
        found = []
        for unit, (state, indices) in enumerate(self._units):
            one = self.states[state]
            if not one.keeps and any(one.buckets[i].has_any for i in indices):
                found.append((unit, self.is_complete(unit)))
        return tuple(found)

    def is_complete(self, unit: int) -> bool:
        """Whether all of a unit's gradients are here."""
        state, indices = self._units[unit]
        return all(self.states[state].buckets[i].is_full for i in indices)

    def discard_local(self) -> None:
        """Discard what this backward has brought and no reduction has. Waits for nothing."""
        self.settle()
        for one in self.states:
            one.discard_local()

    def discard(self) -> None:
        """Discard what this backward has brought. Waits for what was started."""
        self.discard_local()
        while self._flights or self._rest:
            with suppress(AxisError):
                self.wait_all()
        for one in self.states:
            one.discard()


def waits_in_step(plan: ReductionPlan) -> bool:
    """Whether each reduction waits for the other ranks where it starts."""
    virtual = any(axis.runtime is Runtime.VIRTUAL for axis in plan.axes) and not is_abstract()
    return virtual or not all(one.reduction.overlap for one in plan.setups)


def _popped(p: Tensor) -> Tensor:
    """Take `p.grad` away. No frame keeps it: a bucket's gradients go as soon as it is packed."""
    gradient, p.grad = p.grad, None
    assert gradient is not None
    return gradient.detach() if gradient.requires_grad else gradient
