"""The units of several layouts, numbered in one row: what never changes while a model is there."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.ranks.mesh import Axis
from fzero.state.layout import Layout


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
