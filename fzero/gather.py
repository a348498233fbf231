"""Full values of sharded parameters for as long as they are wanted: what placeholders read.

    placeholder read by a kernel -> Gatherer.leaf -> held | Sequencer.use -> start, wait
    the Sequencer goes on        -> free

The gatherer holds full values and starts gathers. When to start and when to free is decided by the
`Sequencer` (fzero/sequence.py), in an order that is the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fzero._modes import for_training
from fzero.collectives import InFlight, about, broadcast, start_gather
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.group_shard import FullUnit, GroupShard
from fzero.homes import page_out
from fzero.mesh import Axis
from fzero.packing import unpack
from fzero.partition import shard_of
from fzero.placeholder import LazyParam
from fzero.state.layout import Layout, Leaf
from fzero.virtual import current_ranks, read_elsewhere


class Gatherer:
    """The full values of groups, gathered unit by unit.

    Groups are numbered over all the states of a pass, in order; so are units. `rounds`: whether a
    pass runs, in which values may be rounded by autocast or to int8 blocks; `changes`: how often
    the values have changed.
    """

    def __init__(self, layouts: Sequence[Layout], axes: Sequence[Axis]) -> None:
        self.groups: list[GroupShard] = []
        self.units: list[tuple[int, ...]] = []
        self._unit_of: dict[int, int] = {}  # group -> its unit
        self._layouts: list[Layout] = []
        self._axes: list[Axis] = []  # of each unit
        self._count = 0  # of groups
        self._here = current_ranks()  # the virtual rank whose values these are
        for layout, axis in zip(layouts, axes, strict=True):
            self.add(layout, axis)
        self.held: dict[int, FullUnit] = {}
        self.kept: set[int] = set()  # units that no plan frees
        self.keeps = False  # what is gathered in a pass is kept; set by its sequencer
        self.rounds = False
        self.changes = 0
        self.use: Callable[[int], None] = self.fetch  # set by the sequencer of a pass
        self.holds: Counter[int] = Counter()  # how many blocks hold a unit now
        self.writable: Counter[int] = Counter()  # how many of them write to it
        self._sources: dict[int, int] = {}  # whose values count in the last one that did
        self.refused = 0  # how many writes
        self.on_gathered: Callable[[int, Tensor], None] = lambda *_: None  # (group, its full flat)
        self.on_hold: Callable[[Sequence[int]], None] = self._fetch_all
        self.on_written: Callable[[Sequence[int]], None] = lambda _: None
        self._flights: dict[int, InFlight] = {}

    def add(self, layout: Layout, axis: Axis) -> int:
        """Add the units of one more layout, on an axis; return the number of its first group."""
        first, self._count = self._count, self._count + len(layout.groups)
        for unit in layout.units:
            groups = tuple(first + index for index in unit)
            self._unit_of.update(dict.fromkeys(groups, len(self.units)))
            self.units.append(groups)
            self._axes.append(axis)
        self._layouts.append(layout)
        return first

    def hold_shards(
        self, flats: Sequence[Sequence[Tensor]], devices: Sequence[torch.device]
    ) -> None:
        """Take the shards of each state as they are now, and where full values are wanted."""
        self.groups = [
            GroupShard(layout, i, flat.detach(), device)
            for layout, some, device in zip(self._layouts, flats, devices, strict=True)
            for i, flat in enumerate(some)
        ]

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each unit, with its padding."""
        flat = [layout.full_numel(i) for layout in self._layouts for i in range(len(layout.groups))]
        return tuple(sum(flat[group] for group in unit) for unit in self.units)

    # What placeholders call.

    def leaf(self, group: int, position: int) -> Tensor:
        """Return one full leaf of a group, gathering its unit unless it is here."""
        unit, here = self._unit_of[group], current_ranks()
        if here and self._here and here.rank != self._here.rank:
            path = self.leaves_of(group)[position].path
            raise read_elsewhere(path, self._here.rank, here.rank)
        for_training(self.use, unit)
        return self.held[unit].leaves[self.units[unit].index(group)][position]

    def device_of(self, group: int) -> torch.device:
        """Return where the values of a group are."""
        return self.groups[group].device

    def leaves_of(self, group: int) -> list[Leaf]:
        """Return the leaves of a group."""
        layout, index, *_ = self.groups[group]
        return [layout.leaves[i] for i in layout.groups[index].leaves]

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Refuse: a write would reach the gathered copy only, and be forgotten."""
        if self.writable[self._unit_of[placeholder.where[0]]]:
            return
        self.refused += 1
        raise LayoutError(
            f"{placeholder!r} is written in place ({func}); this rank holds a shard of it.",
            cause="an in-place method (add_, copy_, ...), an initializer, or an optimizer of "
            "one's own on a parameter of stage 3.",
            fix="in a loss, clone it first: losses are pure. To change a parameter of a "
            "module, use `with fzero.adapter.gathered(module, modify=True)`; "
            "engine.step() runs the optimizer that the engine was made with.",
        )

    def end_write(self, placeholder: LazyParam) -> None:
        """Nothing to do: what was written is sharded where `gathered(modify=True)` ends."""

    @property
    def has_everything(self) -> bool:
        """Whether every unit is kept."""
        return len(self.kept) == len(self.units)

    # What `gathered` calls.

    def unit_of(self, group: int) -> int:
        """Return the unit of a group."""
        return self._unit_of[group]

    def hold(self, units: Sequence[int], source: int | None) -> Sequence[int]:
        """Gather units, and keep them until `let_go`; writable with a `source`. A collective.

        Returns those that it keeps: none in a pass, whose order says what is here. What is read
        there lives as long as whoever has read it.
        """
        if source is not None:
            self._require_writable(units, source)
        if self.rounds:
            return ()
        for_training(self.on_hold, units)
        self.kept.update(units)
        self.holds.update(units)
        if source is not None:
            self.writable.update(units)
            self._sources.update(dict.fromkeys(units, source))
        return units

    def let_go(self, units: Sequence[int], source: int | None) -> None:
        """End a `hold`; a unit of another block stays. All shards get the values of a `source`."""
        self.holds.subtract(units)
        if source is not None:
            self.writable.subtract(units)
            self._share(units, source)
        ended = [unit for unit in units if not self.holds[unit]]
        self.kept.difference_update(ended)
        for unit in ended:
            self.free(unit)

    def _require_writable(self, units: Sequence[int], source: int) -> None:
        if self.rounds:
            raise PhaseError(
                "gathered(modify=True) at stage 3 in a forward or a backward.",
                cause="a module that writes to its own parameters in its forward.",
                fix="write parameters between steps.",
            )
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
        for unit in units:
            shards = self._axes[unit].shards
            flats = broadcast(self.held[unit].flats, self._axes[unit], source)
            for group, flat in zip(self.units[unit], flats, strict=True):
                self.groups[group].shard.copy_(shard_of(flat, shards.size, shards.rank))
        self.on_written(units)

    def _fetch_all(self, units: Sequence[int]) -> None:
        for unit in units:
            self.fetch(unit)

    # What is carried from one pass to the next.

    def adopt(self, gathered: Sequence[Sequence[Tensor]]) -> None:
        """Keep the full flats that each state brings, where it brings all of a unit."""
        flats: dict[int, Tensor] = {}
        first = 0
        for layout, some in zip(self._layouts, gathered, strict=True):
            for i, flat in enumerate(some):
                if flat.numel() == layout.full_numel(i):
                    flats[first + i] = flat
            first += len(layout.groups)
        for unit, groups in enumerate(self.units):
            if all(group in flats for group in groups):
                self._hold(unit, [flats[group] for group in groups], self._is_quantized(unit))
                self.kept.add(unit)

    def kept_flats(self) -> list[tuple[Tensor, ...]]:
        """Return, for each state, the full flat of each group that is kept; of others, empty."""
        for unit in self.kept:
            self.wait(unit)
        whole = {
            group: flat
            for unit in self.kept
            for group, flat in zip(self.units[unit], self.held[unit].flats, strict=True)
        }
        found, first = [], 0
        for layout in self._layouts:
            numbers = range(first, first + len(layout.groups))
            found.append(tuple(whole.get(n, self.groups[n].shard.new_empty(0)) for n in numbers))
            first += len(layout.groups)
        return found

    # What the sequencer calls.

    def start(self, unit: int) -> None:
        """Start to gather a unit, unless it is whole or on the way. A collective."""
        self.kept.update([unit] if self.keeps else [])
        if unit not in self.held and unit not in self._flights:
            self._flights[unit] = self._started(unit, exact=not self.rounds)

    def _started(self, unit: int, *, exact: bool) -> InFlight:
        shards = [self.groups[group].sent(exact=exact) for group in self.units[unit]]
        as_blocks = not exact and self._is_quantized(unit)
        with about(lambda: [x for group in self.units[unit] for x in self.groups[group].paths]):
            return start_gather(shards, self._axes[unit].shards, as_blocks=as_blocks)

    def _is_quantized(self, unit: int) -> bool:
        groups = [self.groups[group] for group in self.units[unit]]
        return any(one.layout.groups[one.index].quantized for one in groups)

    def wait(self, unit: int) -> None:
        """Wait until a unit that was started is whole."""
        flight = self._flights.pop(unit, None)
        if flight is not None:
            self._hold(unit, flight.wait(), flight.as_blocks)
            for group in self.units[unit]:
                page_out(self.groups[group].shard)

    def keep(self, units: Sequence[int]) -> None:
        """Gather what is not here of these units; they stay. A collective if something is not."""
        for unit in units:
            self.start(unit)
        self.kept.update(units)
        for unit in units:
            self.wait(unit)

    def _hold(self, unit: int, flats: list[Tensor], as_blocks: bool) -> None:
        leaves = []
        for group, flat in zip(self.units[unit], flats, strict=True):
            self.on_gathered(group, flat)
            leaves.append(unpack(self.groups[group].layout, self.groups[group].index, flat))
        self.held[unit] = FullUnit(flats, leaves, as_blocks)

    def fetch(self, unit: int) -> None:
        """Gather a unit unless it is here, and wait for it."""
        if unit not in self.held:
            self.start(unit)
            self.wait(unit)

    def take_part(self, unit: int, *, keep: bool, exact: bool) -> None:
        """Gather a unit because a rank asks for it; `keep` it, or drop it."""
        self.kept.update([unit] if self.keeps else [])
        flight = self._started(unit, exact=exact)
        if (keep or self.keeps) and unit not in self.held:
            self._flights[unit] = flight
            self.wait(unit)
        else:
            flight.wait()

    def has(self, unit: int) -> bool:
        """Return whether a unit is whole, or on the way."""
        return unit in self.held or unit in self._flights

    def is_rounded(self, unit: int) -> bool:
        """Return whether a unit is here, and not with the bits of its parameters."""
        full = self.held.get(unit)
        if full is None or full.as_blocks:
            return full is not None
        pairs = zip(self.units[unit], full.flats, strict=True)
        return any(x.dtype != self.groups[group].shard.dtype for group, x in pairs)

    def drop_rounded(self, units: Sequence[int]) -> None:
        """Outside of a pass values are exact: let go of what is rounded, whether kept or not."""
        for unit in () if self.rounds else units:
            if self.is_rounded(unit):
                self.kept.discard(unit)
                self.free(unit)

    def touch(self, unit: int) -> bool:
        """Return whether a unit is whole; it is then the one that was used last."""
        full = self.held.pop(unit, None)
        if full is not None:
            self.held[unit] = full
        return full is not None

    def free(self, unit: int) -> None:
        """Let go of a unit, unless it is kept; one that is on the way is waited for."""
        if unit in self.kept:
            return
        self.held.pop(unit, None)
        flight = self._flights.pop(unit, None)
        if flight is not None:
            with suppress(AxisError):  # nobody wants it any more, whether it comes or not
                flight.wait()

    def release(self, *, all_of_them: bool = False) -> None:
        """Let go of every unit that is not kept, or of all of them."""
        if all_of_them:
            self.kept = set()
        for unit in [*self.held, *self._flights]:
            self.free(unit)
