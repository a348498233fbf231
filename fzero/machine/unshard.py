"""Gathered values of sharded parameters: started, waited for and freed as the protocol says.

    the units     numbered over all states of a pass (`UnitTable`), with this rank's shard of each
    values        the `Gatherer` holds them, and flights
    events        `ProtocolClient` tells the protocol of uses of units and of complete gradients

When to gather and when to free is an effect of the protocol (fzero/state/protocol), in an order
that is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.collectives import InFlight, Performer, about, start_gather
from fzero.context.current_rank import current_ranks, read_elsewhere
from fzero.errors import AxisError, PhaseError
from fzero.machine.offload import page_out, to_device
from fzero.machine.packing import stored_leaves, unpack
from fzero.ranks.mesh import Axis
from fzero.state.layout import Layout, Leaf
from fzero.state.protocol import Changed, Model, Pin, ProtocolEvent, Ready, Unpin, Use
from fzero.state.setup import Home


class Gatherer:
    """The full values of groups, gathered unit by unit.

    Groups are numbered over all the states of a pass, in order; so are units.

    Attributes:
        table: the units.
        groups: this rank's shard of each group.
        held: the full values of units that are here.
        changes: how often the values have changed.
    """

    def __init__(
        self, table: UnitTable, on_gathered: Callable[[int, Tensor], None] | None = None
    ) -> None:
        self.table = table
        self.groups: list[GroupShard] = []
        self.held: dict[int, FullUnit] = {}
        self.changes = 0
        self._flights: dict[int, InFlight] = {}
        self._on_gathered = on_gathered  # (group, its full flat)
        self._here = current_ranks()  # the virtual rank whose values these are

    def hold_shards(
        self,
        flats: Sequence[Sequence[Tensor]],
        devices: Sequence[torch.device],
        homes: Sequence[Home],
    ) -> None:
        """Take the current shards of each state, where each is gathered, and where they live."""
        of_state = zip(self.table.layouts, flats, devices, homes, strict=True)
        self.groups = [
            GroupShard(layout, i, flat.detach(), device, home)
            for layout, some, device, home in of_state
            for i, flat in enumerate(some)
        ]

    def changed(self) -> None:
        """Count a change of the parameters: views of earlier values are stale."""
        self.changes += 1

    # What is here.

    def leaf(self, group: int, position: int) -> Tensor:
        """Return one full leaf of a gathered group: an encoded one is decoded for this read."""
        unit = self.table.unit_of[group]
        held = self.held[unit].leaves[self.table.units[unit].index(group)][position]
        layout, index, *_ = self.groups[group]
        if not layout.groups[index].encoded:
            return held
        return layout.leaves[layout.groups[index].leaves[position]].of(held)

    def encode(self, group: int, position: int, values: Tensor) -> None:
        """Let a gathered leaf that is encoded have these values; another one has them already."""
        layout, index, *_ = self.groups[group]
        if layout.groups[index].encoded:
            unit = self.table.unit_of[group]
            held = self.held[unit].leaves[self.table.units[unit].index(group)][position]
            leaf = layout.leaves[layout.groups[index].leaves[position]]
            held.copy_(leaf.stored(values))

    def require_own_rank(self, group: int, position: int) -> None:
        """Raise `PhaseError` if another virtual rank reads this rank's parameter."""
        here = current_ranks()
        if here and self._here and here.rank != self._here.rank:
            path = self.leaves_of(group)[position].path
            owner, reader = self._here.rank, here.rank
            raise read_elsewhere(path, f"virtual rank {owner}", f"virtual rank {reader}")

    def leaves_of(self, group: int) -> list[Leaf]:
        """Return the leaves of a group."""
        layout, index, *_ = self.groups[group]
        return [layout.leaves[i] for i in layout.groups[index].leaves]

    # What effects ask for.

    def start(self, unit: int, *, exact: bool, keeps: bool = True) -> None:
        """Start to gather a unit. A collective.

        Not `keeps`: another rank needs it; wait for the values, and drop them.
        """
        groups = [self.groups[group] for group in self.table.units[unit]]
        shards = []
        for layout, index, shard, device, home in groups:
            dtype = None if exact else layout.groups[index].communication_dtype  # under autocast
            if home is not None:
                shard = to_device(shard, device, dtype)
            shards.append(shard if home is not None or dtype is None else shard.to(dtype))
        codecs = () if exact else [one.layout.groups[one.index].codec for one in groups]
        with about(lambda: [x for one in groups for x in one.layout.paths([one.index])]):
            flight = start_gather(shards, self.table.axes[unit].shards, codecs=codecs)
        if keeps:
            self._flights[unit] = flight
        else:
            flight.wait()

    def wait(self, unit: int) -> None:
        """Wait for a gather that was started; does nothing if its start raised."""
        flight = self._flights.pop(unit, None)
        if flight is not None:
            self._hold(unit, flight.wait())
            for group in self.table.units[unit]:
                if self.groups[group].home is not None:
                    page_out(self.groups[group].shard)

    def _hold(self, unit: int, flats: list[Tensor]) -> None:
        leaves = []
        for group, flat in zip(self.table.units[unit], flats, strict=True):
            if self._on_gathered is not None:
                self._on_gathered(group, flat)
            layout, index, *_ = self.groups[group]
            if layout.groups[index].encoded:
                leaves.append([x for _, x in stored_leaves(layout, index, flat)])
            else:
                leaves.append(unpack(layout, index, flat))
        self.held[unit] = FullUnit(flats, leaves)

    def free(self, unit: int) -> None:
        """Free a unit; wait for its gather first if that is in flight."""
        self.held.pop(unit, None)
        flight = self._flights.pop(unit, None)
        if flight is not None:
            with suppress(AxisError):  # nobody wants it any more, whether it comes or not
                flight.wait()

    # What is carried from one pass to the next.

    def adopt(self, gathered: Sequence[Sequence[Tensor]]) -> tuple[int, ...]:
        """Take over full flats that states carry; return the units that are complete."""
        flats: dict[int, Tensor] = {}
        table = self.table
        for layout, groups, some in zip(table.layouts, table.groups, gathered, strict=True):
            for i, flat in enumerate(some):
                if flat.numel() == layout.full_numel(i):
                    flats[groups[i]] = flat
        whole = [n for n, unit in enumerate(self.table.units) if all(g in flats for g in unit)]
        for unit in whole:
            self._hold(unit, [flats[group] for group in self.table.units[unit]])
        return tuple(whole)

    def flats_of(self, units: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Return the full flats of each state: those of groups in these units, others empty."""
        full = {
            group: flat
            for unit in units
            for group, flat in zip(self.table.units[unit], self.held[unit].flats, strict=True)
        }
        return [
            tuple(full.get(n, self.groups[n].shard.new_empty(0)) for n in groups)
            for groups in self.table.groups
        ]


class GroupShard(NamedTuple):
    """One group of a layout, this rank's shard of it, where to gather it, and where it lives."""

    layout: Layout
    index: int
    shard: Tensor
    device: torch.device
    home: Home = None


class FullUnit(NamedTuple):
    """The full values of a unit, for each of its groups."""

    flats: list[Tensor]
    leaves: list[list[Tensor]]  # views of the flats; of encoded ones [n], of their bytes


class UnitTable:
    """Units and groups of the states of a pass, in their order.

    Attributes:
        layouts: of each state.
        groups: for each state, the numbers of its groups.
        units: for each unit, the numbers of its groups.
        axes: for each unit, the ranks that share it.
        unit_of: for each group, the number of its unit.
    """

    def __init__(self, layouts: Sequence[Layout], axes: Sequence[Axis]) -> None:
        self.layouts: list[Layout] = []
        self.groups: list[range] = []
        self.units: list[tuple[int, ...]] = []
        self.axes: list[Axis] = []
        self.unit_of: dict[int, int] = {}
        for layout, axis in zip(layouts, axes, strict=True):
            self.add(layout, axis)

    def add(self, layout: Layout, axis: Axis) -> int:
        """Add the units of one more layout, on an axis; return the number of its first group."""
        first = len(self.unit_of)
        for unit in layout.units:
            groups = tuple(first + index for index in unit)
            self.unit_of.update(dict.fromkeys(groups, len(self.units)))
            self.units.append(groups)
            self.axes.append(axis)
        self.layouts.append(layout)
        self.groups.append(range(first, len(self.unit_of)))
        return first

    def state_of(self, group: int) -> tuple[int, int]:
        """Return (the state, the index among its groups) of a group."""
        return next((s, group - some[0]) for s, some in enumerate(self.groups) if group in some)

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each unit, with its padding."""
        flat = [layout.full_numel(i) for layout in self.layouts for i in range(len(layout.groups))]
        return tuple(sum(flat[group] for group in unit) for unit in self.units)

    @property
    def rounds(self) -> frozenset[int]:
        """The units whose values may cross ranks rounded."""
        groups = [group for layout in self.layouts for group in layout.groups]
        return frozenset(
            number
            for number, unit in enumerate(self.units)
            if any(groups[i].codec or groups[i].communication_dtype for i in unit)
        )


class ProtocolClient:
    """One model of a performer's protocol."""

    __slots__ = ("is_over", "number", "performer")

    def __init__(self, performer: Performer, number: int) -> None:
        self.performer, self.number = performer, number
        self.is_over = False

    def leave(self) -> None:
        """No pass of the model will follow; a later one may have its number."""
        self.is_over = True
        self.performer.leave(self.number)

    @property
    def record(self) -> Model:
        """The protocol's record of this model. Raises `PhaseError` after the model has left."""
        found = self.performer.protocol.models.get(self.number)
        if found is None or self.is_over:
            raise PhaseError(
                f"rank {self.performer.axis.rank}: a parameter of stage 3 is read, and what would "
                "gather it is over.",
                cause="a parameter that a loss was given, and that was kept beyond its call; or a "
                "backward through a forward from before engine.close() or engine.reshard().",
                fix="keep p.clone() in the loss, or use fzero.full_params(state) after it; run "
                "loss.backward() before those.",
            )
        return found

    def send(self, event: ProtocolEvent) -> None:
        """Tell the protocol of an event of this model. Raises `PhaseError` after it has left."""
        _ = self.record
        self.performer.send(event)

    def use(self, unit: int) -> None:
        """A kernel reads a unit: gather it if it is not gathered."""
        if not self.record.residency.is_current(unit):  # many kernels read one unit
            self.performer.send(Use(self.number, unit))

    def ready(self, unit: int) -> None:
        """The gradients of a unit are complete."""
        self.send(Ready(self.number, unit))

    def hold(self, units: Sequence[int]) -> Sequence[int]:
        """Gather units and keep them until `let_go`. A collective outside of passes."""
        self.performer.drop_raised()
        before = self.record.residency.blocks
        try:
            self.send(Pin(self.number, tuple(units)))
        except BaseException:
            if self.record.residency.blocks != before:  # it was held, and a gather has raised
                self.let_go(units)
            raise
        return () if self.record.rounds else units

    def let_go(self, units: Sequence[int]) -> None:
        """End a `hold`."""
        self.send(Unpin(self.number, tuple(units)))

    def changed(self) -> None:
        """The parameters changed: free the gathered units, which are stale."""
        self.send(Changed(self.number))
