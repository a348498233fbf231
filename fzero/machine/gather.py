"""Gathered values of sharded parameters: started, waited for and freed as the protocol says.

The gatherer holds values and flights. When to gather and when to free is an effect of the protocol
(fzero/state/protocol), in an order that is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fzero.collectives import InFlight, about, start_gather
from fzero.context.here import current_ranks, read_elsewhere
from fzero.errors import AxisError
from fzero.machine.group_shard import FullUnit, GroupShard
from fzero.machine.offload import page_out
from fzero.machine.packing import stored_leaves, unpack
from fzero.machine.unit_table import UnitTable
from fzero.state.layout import Leaf
from fzero.state.offload import Home


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
        layout, index, *_ = self.groups[group]
        held = self._held(group, position)
        if not layout.groups[index].encoded:
            return held
        return layout.leaves[layout.groups[index].leaves[position]].of(held)

    def encode(self, group: int, position: int, values: Tensor) -> None:
        """Let a gathered leaf that is encoded have these values; another one has them already."""
        layout, index, *_ = self.groups[group]
        if layout.groups[index].encoded:
            leaf = layout.leaves[layout.groups[index].leaves[position]]
            self._held(group, position).copy_(leaf.stored(values))

    def _held(self, group: int, position: int) -> Tensor:
        unit = self.table.unit_of[group]
        return self.held[unit].leaves[self.table.units[unit].index(group)][position]

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

    def start(self, unit: int, *, exact: bool) -> None:
        """Start to gather a unit. A collective."""
        self._flights[unit] = self._started(unit, exact=exact)

    def take_part(self, unit: int, *, exact: bool) -> None:
        """Take part in a gather that another rank needs, and drop the values."""
        self._started(unit, exact=exact).wait()

    def _started(self, unit: int, *, exact: bool) -> InFlight:
        groups = [self.groups[group] for group in self.table.units[unit]]
        shards = [group.sent(exact=exact) for group in groups]
        codecs = () if exact else [group.codec for group in groups]
        with about(lambda: [x for group in groups for x in group.paths]):
            return start_gather(shards, self.table.axes[unit].shards, codecs=codecs)

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
