"""The full values of sharded parameters: gathered, read by placeholders, and freed.

    the units     numbered over all states of a pass (`UnitTable`), with this rank's shard of each
    values        a `Gatherer` holds them, and flights
    events        `ProtocolClient` tells the protocol of uses of units and of complete gradients

placeholder read by a kernel -> Gatherer.leaf -> ProtocolClient.use -> the values are here

When to gather and when to free is an effect of the protocol (fzero/state/protocol.py), in an order
that is the same on every rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.collectives import InFlight, Performer, about, broadcast, start_gather
from fzero.context.current_rank import current_ranks, read_elsewhere
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.machine.offload import page_out, to_device
from fzero.machine.packing import stored_leaves, unpack
from fzero.machine.partition import shard_of
from fzero.machine.placeholder import LazyParam, refuse_part
from fzero.ranks.mesh import Axis
from fzero.state import TrainState
from fzero.state.layout import Layout, Leaf
from fzero.state.protocol import Changed, Model, Pin, ProtocolEvent, Ready, Unpin, Use
from fzero.state.setup import Home


class Gatherer:
    """The full values of groups, gathered unit by unit; written in `gathered` blocks only.

    Groups are numbered over all the states of a pass, in order; so are units.

    has: what a rank has of a leaf, for errors.
    line: a `ProtocolClient`, or what decides in its place when a unit is gathered and freed.
    on_gathered: is told of the full flat of each group. on_written: which units a block wrote.

    Attributes:
        table: the units.
        groups: this rank's shard of each group.
        held: the full values of units that are here.
        changes: how often the values have changed.
        writable: how many blocks write to a unit now.
        refused: how many writes were refused.
    """

    has = "this rank has only a shard of it"

    def __init__(
        self,
        table: UnitTable,
        line: Any,
        on_gathered: Callable[[int, Tensor], None] | None = None,
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.table, self.line = table, line
        self.groups: list[GroupShard] = []
        self.held: dict[int, FullUnit] = {}
        self.changes = self.refused = 0
        self.writable: Counter[int] = Counter()
        self._sources: dict[int, int] = {}  # whose values count in the last block that writes
        self._flights: dict[int, InFlight] = {}
        self._on_gathered, self._on_written = on_gathered, on_written
        self._here = current_ranks()  # the virtual rank whose values these are

    def hold_shards(self, states: Sequence[TrainState]) -> None:
        """Take the current shards of the states, of whose layouts the table is."""
        self.groups = [
            GroupShard(one.setup.layout, i, flat.detach(), one.device, one.setup.offload.params)
            for one in states
            for i, flat in enumerate(one.params.flats)
        ]

    def changed(self) -> None:
        """Count a change of the parameters: views of earlier values are stale."""
        self.changes += 1

    def rest(self) -> None:
        """Let go of all values and shards; a read raises until this goes on."""
        self.groups = [one._replace(shard=one.shard.new_empty(0)) for one in self.groups]
        self.held.clear()

    def go_on(self, line: Any, on_gathered: Callable[[int, Tensor], None] | None) -> None:
        """Read by another line from now on: `hold_shards` comes first."""
        self.line, self._on_gathered = line, on_gathered

    # What placeholders call.

    def leaf(self, group: int, position: int) -> Tensor:
        """Return one full leaf of a group, gathering its unit unless it is here.

        An encoded one is decoded for this read.
        """
        here = current_ranks()
        if here and self._here and here.rank != self._here.rank:
            of, by = (f"virtual rank {one.rank}" for one in (self._here, here))
            raise read_elsewhere(self.leaves_of(group)[position].path, of, by)
        unit = self.table.unit_of[group]
        self.line.use(unit)
        held = self.held[unit].leaves[self.table.units[unit].index(group)][position]
        layout, index, *_ = self.groups[group]
        if not layout.groups[index].encoded:
            return held
        return layout.leaves[layout.groups[index].leaves[position]].of(held)

    def device_of(self, group: int) -> torch.device:
        """Return where the values of a group are."""
        return self.groups[group].device

    def leaves_of(self, group: int) -> list[Leaf]:
        """Return the leaves of a group."""
        layout, index, *_ = self.groups[group]
        return [layout.leaves[i] for i in layout.groups[index].leaves]

    def unit_of(self, group: int) -> int:
        """Return the unit of a group."""
        return self.table.unit_of[group]

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Refuse: a write would reach the gathered copy only, and be forgotten."""
        if self.writable[self.unit_of(placeholder.where[0])]:
            refuse_part(placeholder, func)
            return
        self.refused += 1
        raise LayoutError(
            f"{placeholder!r} is written in place ({func}); this rank holds a shard of it.",
            cause="an in-place method (add_, copy_, ...), an initializer, a collective "
            "(dist.broadcast, dist.all_reduce), or an optimizer of one's own on a parameter of "
            "stage 3.",
            fix="in a loss, clone it first: losses are pure. To change a parameter of a "
            "module, use `with fzero.adapter.gathered(module, modify=True)`, whose end gives all "
            "ranks the values of one; else leave the collective out, ranks have equal parameters. "
            "engine.step() runs the optimizer that the engine was made with.",
        )

    def end_write(self, placeholder: LazyParam, values: Tensor) -> None:
        """Encode what was written, if its leaf is; `gathered(modify=True)` shards it at its end."""
        group, position = placeholder.where
        layout, index, *_ = self.groups[group]
        if layout.groups[index].encoded:
            unit = self.table.unit_of[group]
            held = self.held[unit].leaves[self.table.units[unit].index(group)][position]
            held.copy_(self.leaves_of(group)[position].stored(values))

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

    # What `gathered` calls.

    def drop(self) -> None:
        """Free what is gathered: it is stale."""
        self.line.changed()

    def hold(self, units: Sequence[int], source: int | None) -> Sequence[int]:
        """Gather units, and hold them until `let_go`; writable with a `source`. A collective.

        Returns those that it holds: none in a pass, whose order says what is here. What is read
        there lives as long as whoever has read it.
        """
        if source is not None:
            self._require_one_source(units, source)
        held = self.line.hold(units)
        if source is None:
            return held
        if units and not held:
            raise PhaseError(
                "gathered(modify=True) at stage 3 in a forward or a backward.",
                cause="a module that writes to its own parameters in its forward.",
                fix="write parameters between steps.",
            )
        self.writable.update(held)
        self._sources.update(dict.fromkeys(held, source))
        return held

    def let_go(self, units: Sequence[int], source: int | None) -> None:
        """End a `hold`; a unit of another block stays. All shards get the values of a `source`."""
        if source is not None:
            self.writable.subtract(units)
            self._share(units, source)
        self.line.let_go(units)

    def _require_one_source(self, units: Sequence[int], source: int) -> None:
        for unit in units:
            if self.writable[unit] and self._sources[unit] != source:
                raise PhaseError(
                    f"gathered(modify=True, from_rank={source}) inside a block with "
                    f"from_rank={self._sources[unit]}, on parameters of one unit.",
                    cause="parameters that stage 3 gathers together, written by two ranks.",
                    fix="give both blocks the same from_rank, or end one before the other.",
                )

    @torch.no_grad()
    def _share(self, units: Sequence[int], source: int) -> None:
        table = self.table
        for unit in units:
            shards = table.axes[unit].shards
            flats = broadcast(self.held[unit].flats, table.axes[unit], source)
            for group, flat in zip(table.units[unit], flats, strict=True):
                shard = self.groups[group].shard
                shard.copy_(shard_of(flat, shards.size, shards.rank))
        if self._on_written is not None:
            self._on_written(units)


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


@dataclass(slots=True, eq=False)
class ProtocolClient:
    """One model of a performer's protocol."""

    performer: Performer
    number: int
    is_over: bool = False

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
        self.performer.send(Ready(self.number, unit))

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
        return () if self.record.residency.rounds else units

    def let_go(self, units: Sequence[int]) -> None:
        """End a `hold`."""
        self.send(Unpin(self.number, tuple(units)))

    def changed(self) -> None:
        """The parameters changed: free the gathered units, which are stale."""
        self.send(Changed(self.number))


# Leaves that a rank holds whole: nothing is gathered, and each read decodes those that are encoded.
#
# placeholder read by a kernel -> HeldReader.leaf -> decoded, for as long as the kernel wants it


class HeldReader:
    """Behind the placeholders of leaves of which no rank has a part alone.

    Attributes:
        flats: what this rank holds of each group now.
        writable: how many blocks write to a unit now.
        refused: how many writes were refused.
    """

    changes = 0  # nothing is kept that could be stale
    has = "this rank has it where its state has it"

    def __init__(
        self, layout: Layout, axis: Axis, device: torch.device, flats: Sequence[Tensor]
    ) -> None:
        self.layout, self.axis, self.device, self.flats = layout, axis, device, flats
        self.writable = defaultdict[int, int](int)
        self.refused = 0

    def hold_now(self, flats: Sequence[Tensor]) -> None:
        """Go on with what this rank holds of each group after an update."""
        self.flats = flats

    # What placeholders call.

    def leaf(self, group: int, position: int) -> Tensor:
        """Return one leaf, decoded if it is encoded."""
        leaf, row = self._stored(group, position)
        return leaf.of(to_device(row, self.device))

    def device_of(self, group: int) -> torch.device:
        """Return where kernels read it."""
        return self.device

    def leaves_of(self, group: int) -> list[Leaf]:
        """Return the leaves of a group."""
        return [self.layout.leaves[i] for i in self.layout.groups[group].leaves]

    def unit_of(self, group: int) -> int:
        """Return the unit of a group: itself."""
        return group

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Refuse: a loss is pure."""
        self.refused += 1
        encoded = "is stored encoded, and " if placeholder.codec is not None else ""
        raise LayoutError(
            f"{placeholder!r} {encoded}is written in place ({func}): a loss only reads it.",
            cause="an in-place method (add_, copy_, ...) on a parameter that a loss was given.",
            fix="clone it first: losses are pure. fzero.init makes a state of other values.",
        )

    def end_write(self, placeholder: LazyParam, values: Tensor) -> None:
        """Encode what was written."""
        leaf, row = self._stored(*placeholder.where)
        row.copy_(leaf.stored(values))

    # What `gathered` calls.

    def hold(self, units: Sequence[int], source: int | None) -> Sequence[int]:
        """All of it is here."""
        return units

    def let_go(self, units: Sequence[int], source: int | None) -> None:
        """Let all ranks have what a `source` has."""
        if source is not None:
            held = [self.flats[unit] for unit in units]
            for flat, values in zip(held, broadcast(held, self.axis, source), strict=True):
                flat.copy_(values)

    def drop(self) -> None:
        """Forget what is stale: nothing is kept."""

    def _stored(self, group: int, position: int) -> tuple[Leaf, Tensor]:
        held = self.layout.groups[group]
        leaf, offset = self.layout.leaves[held.leaves[position]], held.offsets[position]
        return leaf, self.flats[group].detach()[offset : offset + leaf.numel]


class WritableReader(HeldReader):
    """Of an engine: what is written between steps is encoded in its place, in a block or not."""

    def __init__(self, *of_held: Any) -> None:
        super().__init__(*of_held)
        self.writable = defaultdict[int, int](lambda: 1)

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Let it write to the decoded values; refuse a write to a part of them."""
        refuse_part(placeholder, func)
