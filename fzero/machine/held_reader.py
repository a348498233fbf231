"""Encoded leaves that a rank holds whole: nothing is gathered, and each read decodes.

placeholder read by a kernel -> HeldReader.leaf -> decoded, for as long as the kernel wants it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import broadcast
from fzero.errors import LayoutError
from fzero.machine.offload import to_device
from fzero.machine.placeholder import LazyParam, refuse_part
from fzero.ranks.mesh import Axis
from fzero.state.layout import Layout, Leaf


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
