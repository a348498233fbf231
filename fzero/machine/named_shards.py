"""This rank's parts of flats by the paths of their leaves, and back: what a transform works on.

    flats [l]  - by_path ->  {path: the elements of that leaf in this rank's part, 1-D}
               <- as_flats -

Every rank has every path: a leaf of which it has nothing has an empty tensor. Padding is in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from fzero.machine.packing import leaf_ranges
from fzero.machine.partition import named_leaves
from fzero.state import Buffers, Layout, Part, Setup
from fzero.state.layout import Leaf, as_complex, as_real

Pieces = dict[str, Tensor]
"""{path of a leaf: this rank's elements of it, 1-D}."""


class Range(NamedTuple):
    """The elements of one leaf in this rank's part of a flat."""

    path: str
    leaf: Leaf
    at: int  # where they begin in the part
    numel: int  # in the part: two real ones for each complex one
    first: int  # the element of the leaf that is at `at`

    @property
    def count(self) -> int:
        """How many elements they are to their user: one for each complex number."""
        return self.numel // 2 if self.leaf.dtype.is_complex else self.numel

    def of(self, flat: Tensor) -> Tensor:
        """Return them: a view; complex if the leaf is."""
        held = flat[self.at : self.at + self.numel]
        is_complex = self.leaf.dtype.is_complex and held.dtype.itemsize >= 4
        return as_complex(held) if is_complex else held


class FlatRanges(NamedTuple):
    """The leaves of one flat."""

    index: int  # of its group
    numel: int  # of this rank's part
    ranges: tuple[Range, ...]


def leaf_paths(layout: Layout) -> tuple[str, ...]:
    """Return the path of every leaf; one that two leaves share is numbered from the second on.

    Example:
        >>> from fzero.machine.partition import plan_layout
        >>> leaf_paths(plan_layout({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ranks=1))
        ('a.b', 'a.b#2')
    """
    return layout.names


@lru_cache(maxsize=64)
def leaf_numbers(layout: Layout) -> dict[str, int]:
    """Return the number of the leaf of each path of `leaf_paths`."""
    return {path: number for number, path in enumerate(leaf_paths(layout))}


def all_paths(layout: Layout) -> list[list[str]]:
    """Return the paths of every leaf: its name in a checkpoint first; several of a tied one."""
    found: list[list[str]] = [[name] for name in leaf_paths(layout)]
    marks = [torch.empty(0, device="meta") for _ in layout.slots]
    paths = named_leaves(optree.tree_unflatten(layout.treespec, marks))[0]
    for path, leaf in zip(paths, layout.slots, strict=True):
        found[leaf].append(path)
    return found


def tied_names(layout: Layout) -> dict[str, str]:
    """Return {another path of a tied leaf: its name in a checkpoint}."""
    if len(layout.slots) == len(layout.leaves):
        return {}
    names = {*leaf_paths(layout)}
    return {x: name for name, *some in all_paths(layout) for x in some if x not in names}


@lru_cache(maxsize=256)  # every update asks for the same ones
def ranges_of(layout: Layout, part: Part, groups: tuple[int, ...]) -> tuple[FlatRanges, ...]:
    """Return which leaves lie where in part `part` of the flats of some groups."""
    paths, found = leaf_paths(layout), list[FlatRanges]()
    for index in groups:
        held = {one.leaf: one for one in leaf_ranges(layout, index, part)}
        ranges = []
        for leaf in layout.groups[index].leaves:
            one = held.get(leaf)
            numel = 0 if one is None else one.stop - one.start
            at, first = (0, 0) if one is None else (one.at, one.start)
            if layout.leaves[leaf].dtype.is_complex:
                first //= 2
            ranges.append(Range(paths[leaf], layout.leaves[leaf], at, numel, first))
        numel = layout.full_numel(index) // part.count
        found.append(FlatRanges(index, numel, tuple(ranges)))
    return tuple(found)


def ranges_in(setup: Setup, buffers: Buffers, *, every: bool = False) -> tuple[FlatRanges, ...]:
    """Return which leaves lie where in this rank's part of buffers of a state.

    every: they are of all groups; else of those that learn.
    """
    layout = setup.layout
    groups = tuple(range(len(layout.groups))) if every else tuple(layout.trainable)
    return ranges_of(layout, setup.part(buffers.placement, setup.axis.rank), groups)


def by_path(ranges: Sequence[FlatRanges], flats: Sequence[Tensor]) -> Pieces:
    """Return the elements of each leaf in this rank's part: views."""
    return {
        one.path: one.of(flat)
        for some, flat in zip(ranges, flats, strict=True)
        for one in some.ranges
    }


def as_flats(
    ranges: Sequence[FlatRanges],
    flats: Sequence[Tensor],
    given: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
) -> tuple[Tensor, ...]:
    """Return flats with other elements: the old ones where no piece of theirs is another tensor.

    given: what `by_path` made of the flats. new: what a function made of those.
    """
    made = []
    for some, flat in zip(ranges, flats, strict=True):
        same = all(new[one.path] is given[one.path] for one in some.ranges)
        made.append(flat if same else _packed(some, flat, new))
    return tuple(made)


def _packed(some: FlatRanges, flat: Tensor, new: Mapping[str, Tensor]) -> Tensor:
    """Return one flat of its leaves' elements, with zeros between them."""
    pieces, end = list[Tensor](), 0
    # A rank of which a leaf has nothing has its piece all the same: the flat is differentiated, or
    # has a tangent, on every rank alike.
    for one in sorted(some.ranges, key=lambda one: one.at):
        if one.at > end:
            pieces.append(flat.new_zeros(one.at - end))
        pieces.append(as_real(new[one.path]).reshape(-1))
        end = max(end, one.at + one.numel)
    if some.numel > end:
        pieces.append(flat.new_zeros(some.numel - end))
    # New memory in any case: a function may return one tensor as two values. It is contiguous, also
    # of one element of another stride (`zeros(()).expand(1)`), which has no view as bytes.
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(pieces)
