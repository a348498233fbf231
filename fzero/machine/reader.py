"""What placeholders hold: their values, whoever makes sure that these are here, and who may write.

placeholder read by a kernel -> Reader.leaf -> ProtocolClient.use -> the values are here
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import broadcast
from fzero.errors import LayoutError, PhaseError
from fzero.machine.offload import to_device
from fzero.machine.partition import shard_of
from fzero.machine.placeholder import LazyParam, refuse_part
from fzero.machine.unshard import Gatherer
from fzero.ranks.mesh import Axis
from fzero.state.layout import Layout, Leaf


class Reader:
    """The values of placeholders, read as they are wanted; written in `gathered` blocks only.

    line: a `ProtocolClient`, or what decides in its place when a unit is gathered and freed.

    Attributes:
        writable: how many blocks write to a unit now.
        refused: how many writes were refused.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        line: Any,
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.gatherer, self.line = gatherer, line
        self._on_written = on_written
        self.writable: Counter[int] = Counter()
        self._sources: dict[int, int] = {}  # whose values count in the last block that writes
        self.refused = 0

    # What placeholders call.

    def leaf(self, group: int, position: int) -> Tensor:
        """Return one full leaf of a group, gathering its unit unless it is here."""
        self.gatherer.require_own_rank(group, position)
        self.line.use(self.gatherer.table.unit_of[group])
        return self.gatherer.leaf(group, position)

    @property
    def changes(self) -> int:
        """How often the values have changed."""
        return self.gatherer.changes

    def device_of(self, group: int) -> torch.device:
        """Return where the values of a group are."""
        return self.gatherer.groups[group].device

    def leaves_of(self, group: int) -> list[Leaf]:
        """Return the leaves of a group."""
        return self.gatherer.leaves_of(group)

    def unit_of(self, group: int) -> int:
        """Return the unit of a group."""
        return self.gatherer.table.unit_of[group]

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
        self.gatherer.encode(*placeholder.where, values)

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
        table = self.gatherer.table
        for unit in units:
            shards = table.axes[unit].shards
            flats = broadcast(self.gatherer.held[unit].flats, table.axes[unit], source)
            for group, flat in zip(table.units[unit], flats, strict=True):
                shard = self.gatherer.groups[group].shard
                shard.copy_(shard_of(flat, shards.size, shards.rank))
        if self._on_written is not None:
            self._on_written(units)


# Encoded leaves that a rank holds whole: nothing is gathered, and each read decodes.
#
# placeholder read by a kernel -> HeldReader.leaf -> decoded, for as long as the kernel wants it


class HeldReader:
    """Behind the placeholders of encoded leaves where no rank has a part of them alone.

    Attributes:
        flats: what this rank holds of each group now.
        writable: how many blocks write to a unit now.
        refused: how many writes were refused.
    """

    changes = 0  # nothing is kept that could be stale

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
        """Return one leaf, decoded."""
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
        raise LayoutError(
            f"{placeholder!r} is written in place ({func}); it is stored encoded, and a loss only "
            "reads it.",
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
