"""Gradients of leaves -> buckets -> collectives that run beside the backward -> this rank's shard.

    pop_grad(state, leaf, p)        autograd made one
      the bucket is full            pack -> [W l] in the dtype of the wire
      it may start                  the first collective of its route, at most two at a time:
                                    reduce-scatter or all-reduce; all-to-all if it is encoded
      it is over                    the next of its route (on a mesh of two dims across replicas;
                                    an encoded sum on its way back), beside the next bucket
    all of it is over             / W, unless packing did -> means, in the dtype of their sums

The route of a bucket, one collective after another:

    plain, stages 1 to 3    reduce-scatter over the shards, then what a mesh of two dims has left
    plain, stage 0          all-reduce
    logical ranks           all-to-all of parts, which their owners sum by a tree; then gathered
                            where gradients are placed in larger parts
    encoded                 see fzero/machine/compress.py; of "replicas", after the reduce-scatter
    as factors              two all-reduces: see fzero/machine/compress.py

A bucket is one group below stage 3; at stage 3 it is a unit, whose parameters are gathered
together. The protocol says which one may start, in one order on every rank, so ranks may use other
parameters, or use them in another order.

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3 (buckets in one order).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.collectives import (
    InFlight,
    Over,
    about,
    start_all_to_all,
    start_gather,
    start_reduce,
    start_scatter,
    start_tree_sum,
)
from fzero.context.current_rank import is_abstract
from fzero.context.modes import is_recorded
from fzero.errors import AxisError
from fzero.machine.compress import Encoder, FactorEncoder, GradientEncoder, goes_back
from fzero.machine.offload import add_to, offloaded, to_device
from fzero.machine.packing import pack_copied, unpack
from fzero.machine.powersgd import powersgd
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import Placement, Setup, logical
from fzero.state.layout import Layout, as_bits, as_real
from fzero.state.progress import ALL

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
        dtype = None if times is None else one.setup.accumulate_dtype(index)
        is_full = one.buckets[index].pop_grad(position, p, times, dtype)
        one.used.add(leaf)
        self.received += 1
        if self._on_full is None or one.keeps or not is_full:
            return
        if len(self._units[unit][1]) == 1 or self.is_complete(unit):
            self._on_full(unit)

    def begin(self, states: Sequence[tuple[Setup, bool]]) -> None:
        """A backward begins. For each state: its setup, and whether gradients stay on this rank."""
        self.settle()
        for one, setup_and_keeps in zip(self.states, states, strict=True):
            one.begin(*setup_and_keeps)

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
        if self.plan.bounded[unit]:
            self.wait(IN_FLIGHT - 1)
        local = [one.sent(i, mine=mine) for i in indices]
        with about(partial(one.setup.layout.paths, indices)):
            flight = one.route[0].start(local, indices)
        self._flights.append((unit, flight))
        if not one.setup.reduction.overlap:
            self.wait()

    @property
    def has_room(self) -> bool:
        """Whether the next reduction would start, and this rank go on, without a wait."""
        if waits_in_step(self.plan):
            return False
        flights = [flight for _, flight in self._flights] + [one for *_, one in self._rest]
        return all(flight.is_over for flight in flights)

    def wait(self, first: int | None = None) -> None:
        """Wait for all that was started, hop by hop of each route. All ranks are at one place.

        first: only until so many reductions are in the first hop of theirs: the other hops of the
        last one go on beside the next reduction.
        """
        while len(self._flights) > (first or 0) or (self._rest and first is None):
            # In the order of the starts: what is waited for may communicate again.
            if self._rest:
                unit, hop, flight = self._rest.popleft()
            else:
                (unit, flight), hop = self._flights.popleft(), 0
            number, indices = self._units[unit]
            one, received = self.states[number], flight.wait()
            if hop + 1 == len(one.route):
                for index, got in zip(indices, received, strict=True):
                    one.add_sum(index, got)
                continue
            after = one.route[hop + 1]
            if after.sent is not None:
                received = [after.sent(i, got) for i, got in zip(indices, received, strict=True)]
            with about(partial(one.setup.layout.paths, indices)):
                self._rest.append((unit, hop + 1, after.start(received, indices)))

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

    def discard_own(self) -> None:
        """Discard what this backward has brought and no reduction has. Waits for nothing."""
        self.settle()
        for one in self.states:
            one.discard_own()

    def discard(self) -> None:
        """Discard what this backward has brought. Waits for what was started."""
        self.discard_own()
        while self._flights or self._rest:
            with suppress(AxisError):
                self.wait()
        for one in self.states:
            one.discard()


def waits_in_step(plan: ReductionPlan) -> bool:
    """Whether each reduction waits for the other ranks where it starts."""
    virtual = any(axis.runtime is Runtime.VIRTUAL for axis in plan.axes) and not is_abstract()
    return virtual or not all(one.reduction.overlap for one in plan.setups)


class LocalGradients:
    """The buckets of one state: filled leaf by leaf, then reduced, then divided into means.

    Attributes:
        keeps: whether they stay on this rank, for a coalescing window.
        means: {group: its mean over ranks} of what was reduced.
        encoder: what encodes them where they cross ranks; None if nothing does.
        route: the collectives that sum them.
        used: the leaves that got a gradient.
    """

    def __init__(
        self, setup: Setup, axis: Axis, route: list[Hop] | None, device: torch.device
    ) -> None:
        self.setup, self.axis, self._device = setup, axis, device
        layout, contiguous = setup.layout, setup.reduction.contiguous_gradients
        self.buckets = {
            i: Bucket(layout, i, contiguous and len(layout.groups[i].leaves) > 1)
            for i in layout.trainable
        }
        self.encoder: GradientEncoder | None = None
        if route is None:
            kind = FactorEncoder if isinstance(setup.codec, powersgd) else Encoder
            self.encoder = kind(setup)
            route = route_of(setup, axis, self.encoder)
        self.route = route
        self.means: dict[int, Tensor] = {}
        self.used: set[int] = set()
        self.begin(setup, keeps=False)

    def begin(self, setup: Setup, keeps: bool) -> None:
        """A backward begins: `setup` says how its gradients are summed.

        In a graph none are in the memory that is sent: what divides them after the sum is compiled
        into the update.
        """
        self.setup, self.keeps = setup, keeps
        self._in_place = setup.reduces_in_place and not is_recorded(())

    def sent(self, index: int, *, mine: bool) -> Tensor:
        """Return what this rank sends for one group; zeros without a gradient, or if not `mine`."""
        setup, encoder = self.setup, self.encoder
        if setup.reduction.over == "replicas":
            encoder = None  # until it is reduced over the shards
        gradient = None
        if mine:
            divisor = setup.divides_first(index) if self._in_place else None
            gradient = self.buckets[index].pop(self._device, divisor=divisor)
        if gradient is None:
            dtype = setup.communication_dtype(index)
            numel = setup.layout.full_numel(index)
            gradient = torch.zeros(numel, dtype=dtype, device=self._device)
            return gradient if encoder is None else encoder.sent(index, gradient, mine=mine)
        return setup.sent(index, gradient) if encoder is None else encoder.sent(index, gradient)

    def add_sum(self, index: int, got: Tensor) -> None:
        """Divide a sum over ranks by W, unless packing did; add it to the mean of the group."""
        setup = self.setup
        if self.encoder is not None:
            got = self.encoder.result(index, got)
        mean = got.to(setup.accumulate_dtype(index))
        first = setup.divides_first(index) if self._in_place else 1.0
        if (divisor := setup.divisor / first) != 1.0:
            mean.div_(divisor)
        home = setup.offload.gradients
        if index in self.means:
            self.means[index].add_(mean) if home is None else add_to(self.means[index], mean)
        else:
            self.means[index] = mean if home is None else offloaded(home, mean, setup.offload)

    # What is here.

    @property
    def has_any(self) -> bool:
        """Whether any of this rank's own gradients are not yet reduced."""
        return any(bucket.has_any for bucket in self.buckets.values())

    def pop_local(self, *, to_write: bool = False) -> dict[int, Tensor]:
        """Remove and return this rank's own unreduced gradients: {group: [W l]}.

        `to_write`: later gradients are added to them in place.
        """
        written = set[int]() if to_write else None
        found = {}
        for index, bucket in self.buckets.items():
            flat = bucket.pop(written=written)
            if flat is not None:
                found[index] = flat.to(self.setup.accumulate_dtype(index))
        return found

    def pop_local_into(self, totals: dict[int, Tensor], factor: float) -> None:
        """totals[group] += factor * `pop_local()`[group], without a copy in between."""
        for index, total in totals.items():
            self.buckets[index].pop_into(total, factor)

    def pop_means(self) -> list[Tensor]:
        """Remove and return this rank's part of each mean, or zeros; [] if nothing was reduced."""
        means, self.means, setup = self.means, {}, self.setup

        def zeros(index: int) -> Tensor:
            numel, dtype = setup.numel(index, setup.gradients), setup.accumulate_dtype(index)
            return torch.zeros(numel, dtype=dtype, device=self._device)

        return [means[i] if i in means else zeros(i) for i in self.buckets] if means else []

    def pop_used(self) -> int:
        """Remove and return the leaves that got a gradient, as bits; `ALL` if all did."""
        used, self.used = self.used, set()
        layout = self.setup.layout
        count = sum(len(layout.groups[i].leaves) for i in self.buckets)
        return ALL if len(used) == count else as_bits(used)

    def discard_own(self) -> None:
        """Discard the gradients that are not yet in a reduction."""
        self.pop_local()
        self.used.clear()

    def discard(self) -> None:
        """Discard everything."""
        self.discard_own()
        self.means = {}
        if self.encoder is not None:
            self.encoder.discard()


@dataclass(slots=True)
class Bucket:
    """The gradients of one group that this backward has produced and that are not yet reduced.

    contiguous: each is copied to its place in one buffer as it comes.
    """

    layout: Layout
    index: int
    contiguous: bool
    _waited: Tensor | None = None
    _owned: bool = False
    _gradients: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _flat: Tensor | None = None
    _views: list[Tensor] = field(default_factory=list[Tensor])

    def pop_grad(
        self,
        position: int,
        p: Tensor,
        times: Callable[[Tensor, torch.dtype], Tensor] | None,
        dtype: torch.dtype | None,
    ) -> bool:
        """Take `p.grad`, the gradient of one leaf, away from `p`; return whether all are here.

        No other frame keeps it: a bucket's gradients go as soon as it is packed.
        """
        gradient, p.grad = p.grad, None
        assert gradient is not None
        if gradient.requires_grad:
            gradient = gradient.detach()
        if times is not None and dtype is not None:
            gradient = times(gradient, dtype)
        if self.contiguous:  # so that autograd's tensor can be freed
            if self._flat is None:
                self._flat = as_real(gradient).new_zeros(self.layout.full_numel(self.index))
                self._views = unpack(self.layout, self.index, self._flat)
            gradient = self._views[position].add_(gradient)
        elif position in self._gradients:
            gradient = self._gradients[position] + gradient
        self._gradients[position] = gradient
        return len(self._gradients) == len(self.layout.groups[self.index].leaves)

    def add_waiting(self, flat: Tensor, *, owned: bool) -> None:
        """Add gradients [W l] of earlier backwards. They are written to only if `owned`."""
        self._waited, self._owned = flat, owned

    @property
    def is_full(self) -> bool:
        """Whether every leaf has its gradient."""
        return len(self._gradients) == len(self.layout.groups[self.index].leaves)

    @property
    def has_any(self) -> bool:
        """Whether any leaf has its gradient, or gradients of earlier backwards were added."""
        return bool(self._gradients) or self._waited is not None

    def pop(
        self,
        device: torch.device | None = None,
        *,
        divisor: float | None = None,
        written: set[int] | None = None,
    ) -> Tensor | None:
        """Remove and return the flat gradient [W l]; None if the bucket is empty.

        device: where it is wanted; None: where it is, for what has waited may be offloaded.

        divisor: divide by it, in memory of its own: the rest of the backward may still read the
        memory of what it has brought. The division is made as gradients are copied, for a pass over
        memory of its own would cost as much again.

        written: Autograd may hand out one memory for two parameters, in views of it. So where
        gradients are written to later, the second one in the same memory is copied; this says where
        the others are.
        """
        gradients, flat, waited = self._emptied()
        if gradients is not None:
            flat = pack_copied(self.layout, self.index, gradients, divisor=divisor)
            if written is not None and _is_shared(flat, written):
                flat = flat.clone()
        elif flat is not None and divisor not in (None, 1.0):
            flat.div_(divisor)
        if waited is None:
            return flat
        if flat is not None:
            return torch.add(flat, to_device(waited, flat.device), alpha=1 / (divisor or 1.0))
        if divisor is not None:
            waited = waited.div_(divisor) if self._owned else waited / divisor
        return waited if device is None else to_device(waited, device)

    def pop_into(self, total: Tensor, factor: float) -> None:
        """total += factor * gradients, leaf by leaf, without a flat between; empty the bucket."""
        gradients, flat, waited = self._emptied()
        for whole in (flat, waited):
            if whole is not None:
                total.add_(_times(whole, total.dtype, factor))
        if gradients is not None:
            for place, gradient in zip(
                unpack(self.layout, self.index, total), gradients, strict=True
            ):
                if gradient is not None:
                    place.add_(_times(gradient, place.dtype, factor))

    def _emptied(self) -> tuple[list[Tensor | None] | None, Tensor | None, Tensor | None]:
        """Empty the bucket: (leaves to pack, or the buffer they are in, earlier gradients)."""
        gradients, self._gradients = self._gradients, {}
        flat, self._flat, self._views = self._flat, None, []
        waited, self._waited = self._waited, None
        if not gradients or flat is not None:
            return None, flat, waited
        count = len(self.layout.groups[self.index].leaves)
        return [gradients.get(i) for i in range(count)], None, waited


def _times(gradient: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    return gradient if factor == 1.0 else gradient.to(dtype) * factor


def _is_shared(flat: Tensor, written: set[int]) -> bool:
    """Whether a gradient is a view of a larger storage, or shares it with an earlier one."""
    storage = flat.untyped_storage()
    shared = storage.nbytes() != flat.numel() * flat.element_size()
    shared = shared or storage._cdata in written
    written.add(storage._cdata)
    return shared


class Hop(NamedTuple):
    """One collective of a route, and what it sends of what came before."""

    start: Callable[[Sequence[Tensor], Sequence[int]], InFlight]  # of a tensor of each group
    sent: Callable[[int, Tensor], Tensor] | None = None  # of a group; None: it as it is


class ReductionPlan:
    """How gradients of some states are reduced, as far as it is known without any of them.

    Attributes:
        setups, axes: of each state.
        units: for each unit, its state, and those of its groups that learn.
        where: of each state, for each leaf: its unit, its group, its place in the group.
        bounded: for each unit, whether the inputs of few reductions may be alive at once: so it is
            but for all-reduces.
        routes: of each state; None where an encoder, which a pass has of its own, is on the way.
        alone: whether gradients stay where they are.
    """

    def __init__(self, setups: Sequence[Setup], axes: Sequence[Axis]) -> None:
        self.setups, self.axes = setups, axes
        self.units: list[tuple[int, tuple[int, ...]]] = []
        self.where = [self._added(number, setup) for number, setup in enumerate(setups)]
        summed = [one.reduces_in_place and one.logical is None for one in setups]
        self.bounded = [setups[n].encodes_gradients or not summed[n] for n, _ in self.units]
        self.routes = [
            None if setup.encodes_gradients else route_of(setup, axis, None)
            for setup, axis in zip(setups, axes, strict=True)
        ]
        streams = any(setup.streams for setup in setups)
        self.alone = axes[0].runtime is Runtime.LOCAL and not streams

    def _added(self, number: int, setup: Setup) -> dict[int, tuple[int, int, int]]:
        where: dict[int, tuple[int, int, int]] = {}
        learning = set(setup.layout.trainable)
        for unit in setup.layout.units:
            indices = tuple(i for i in unit if i in learning)
            for i in indices:
                for position, leaf in enumerate(setup.layout.groups[i].leaves):
                    where[leaf] = len(self.units), i, position
            self.units.append((number, indices))
        return where


def route_of(setup: Setup, axis: Axis, encoder: GradientEncoder | None) -> list[Hop]:
    """Return the collectives for a bucket of this state; the first sends `LocalGradients.sent`."""
    ordered = setup.reduction.ordered

    def over(axis: Axis, start: Callable[..., InFlight]) -> Any:
        return lambda xs, _: start(xs, axis)

    scatter, reduce = (
        partial(start_scatter, ordered=ordered),
        partial(start_reduce, ordered=ordered),
    )
    if setup.logical is not None:
        by_tree = Hop(lambda xs, indices: start_nodes(setup, axis, [[x] for x in xs], indices))
        return [by_tree, *(Hop(over(one, start_gather)) for one in gathered_over(setup, axis))]
    if isinstance(encoder, FactorEncoder):
        return [Hop(over(axis, reduce)), Hop(over(axis, reduce), encoder.sent_back)]
    at_once = encoder is None or setup.reduction.over == "all"
    if encoder is not None and not encoder.codec.linear:
        hops = [Hop(over(axis, start_all_to_all))]
        if not at_once:
            across = Hop(over(axis.replicas, start_all_to_all), encoder.sent)
            hops = [Hop(over(axis.shards, scatter)), across]
        if goes_back(setup):
            back = axis if setup.reduces_in_place else axis.replicas
            hops.append(Hop(over(back, start_gather), encoder.sent_back))
        return hops
    if setup.reduces_in_place:
        return [Hop(over(axis, reduce))]
    if axis.dims is None:
        return [Hop(over(axis.shards, scatter))]
    start = scatter if setup.gradients is Placement.OVER_ALL else reduce
    sent = None if at_once or encoder is None else encoder.sent
    return [Hop(over(axis.shards, scatter)), Hop(over(axis.replicas, start), sent)]


def start_nodes(
    setup: Setup, axis: Axis, held: Sequence[Sequence[Tensor]], indices: Sequence[int]
) -> InFlight:
    """Start to sum the nodes of some groups over logical ranks: this rank's nodes of each.

    Given are the parts over all ranks, in the dtypes in which gradients add up.
    """
    assert setup.logical is not None
    parts = tuple(setup.part(Placement.OVER_ALL, rank).index for rank in range(axis.size))
    over = Over(axis, setup.logical.ranks, parts)
    return start_tree_sum(held, over, [setup.accumulate_dtype(i) for i in indices])


def gathered_over(setup: Setup, axis: Axis) -> list[Axis]:
    """The axes over which parts of all ranks are gathered to those that gradients have."""
    if setup.gradients is Placement.OVER_ALL:
        return []
    steps = [axis.replicas, axis.shards] if setup.reduces_in_place else [axis.replicas]
    return [over for over in steps if over.size > 1]


# The gradients of several logical ranks on one rank: rows of a window, nodes of the tree, a mean.
#
#     rows     one flat [W l] for each logical rank, added up call by call
#     nodes    sums of rows: whole nodes of the tree, as few as there can be
#     mean     nodes of all ranks -> the part of each, summed by its owner -> / L
#
# Rows are folded as they come where one call has all that they get, so a rank holds its nodes and
# one row more.

Row = dict[int, Tensor]
"""{group: the gradient [W l] of one logical rank}."""


class Nodes:
    """The nodes of a rank's logical ranks, whose rows come in order."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self._setup, self._device = setup, device
        self._held: tuple[tuple[logical.Node, Row], ...] = ()
        self._next = setup.carried(setup.axis.rank).start

    def push(self, row: Mapping[int, Tensor], place: int | None = None) -> None:
        """Add the row of the next logical rank, or of that at `place`. It is not written to.

        Those before it that brought nothing have zeros.
        """
        setup = self._setup
        assert setup.logical is not None
        if place is not None:
            self._fill(setup.carried(setup.axis.rank)[place])
        sent = {
            i: setup.sent(i, to_device(x, self._device)).to(setup.accumulate_dtype(i))
            for i, x in row.items()
        }
        node = self._next, self._next + 1
        self._held = logical.push(self._held, node, sent, setup.logical.ranks, _added)
        self._next += 1

    def _fill(self, stop: int) -> None:
        layout = self._setup.layout
        while self._next < stop:
            self.push(
                {
                    i: torch.zeros(
                        layout.full_numel(i),
                        dtype=self._setup.accumulate_dtype(i),
                        device=self._device,
                    )
                    for i in layout.trainable
                }
            )

    def mean(self, axis: Axis) -> Row:
        """Return, and forget, the mean over all logical ranks: {group: this rank's part}.

        A collective over `axis`, which has the ranks of the setup.
        """
        setup = self._setup
        self._fill(setup.carried(setup.axis.rank).stop)
        rows, self._held = [row for _, row in self._held], ()
        means: Row = {}
        # The last first, as in a backward; one at a time, and what was sent is freed.
        for indices in (setup.layout.units[i] for i in reversed(range(len(setup.layout.units)))):
            some = [i for i in indices if i in rows[0]]
            if not some:
                continue
            held = [[row.pop(i) for row in rows] for i in some]
            with about(lambda some=some: setup.layout.paths(some)):
                sums = start_nodes(setup, axis, held, some).wait()
                del held
                for over in gathered_over(setup, axis):
                    sums = start_gather(sums, over).wait()
            for i, total in zip(some, sums, strict=True):
                mean = total if setup.divisor == 1.0 else total.div_(setup.divisor)
                means[i] = offloaded(setup.offload.gradients, mean, setup.offload)
        return means


def _added(earlier: Row, later: Row) -> Row:
    """Return the sum of two nodes, which are given up."""
    return {i: earlier.pop(i) + later.pop(i) for i in [*earlier]}
