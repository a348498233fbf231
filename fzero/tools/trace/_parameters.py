"""Map values of a graph to parameters, and views to indices of the values they view."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.collectives import CollectiveEvent
from fzero.state import Layout, Part, Setup
from fzero.tools.trace.alive import inputs_of
from fzero.tools.trace.program import RecordedStep

_FLAT = re.compile(r"^(state.*)\.params\.flats\[(\d+)\]$")
_aten = torch.ops.aten


class Flat(NamedTuple):
    """The flat buffer of a group, full or a shard."""

    layout: Layout
    index: int
    start: int  # of it in its storage, in elements
    is_whole: bool
    part: Part  # which one of it this rank updates

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters of the group."""
        return tuple(self.layout.leaves[i].path for i in self.layout.groups[self.index].leaves)

    def parameter(self, x: Tensor) -> str:
        """Return the path of the parameter that has all elements of a view and no other ones."""
        group = self.layout.groups[self.index]
        begin = int(x.storage_offset()) - self.start
        for leaf, offset in zip(group.leaves, group.offsets, strict=True):
            if begin == offset and x.numel() == self.layout.leaves[leaf].numel > 0:
                return self.layout.leaves[leaf].path
        return ""

    def leaf_of(self, x: Tensor) -> tuple[str, int] | None:
        """Return the parameter that a view is in, and where it starts there, in bytes."""
        group = self.layout.groups[self.index]
        begin = self._begin(x)
        reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        end = begin + reach * x.itemsize if x.numel() else begin
        for leaf, offset in zip(group.leaves, group.offsets, strict=True):
            first, size = offset * group.dtype.itemsize, group.dtype.itemsize
            if first <= begin and end <= first + self.layout.leaves[leaf].numel * size:
                return self.layout.leaves[leaf].path, begin - first
        return None

    def is_own_shard(self, x: Tensor) -> bool:
        """Whether a view is the part of the flat that this rank updates."""
        numel = self.layout.full_numel(self.index) // self.part.count
        begin = self.part.index * numel * self.layout.groups[self.index].dtype.itemsize
        return x.ndim == 1 and x.numel() == numel and self._begin(x) == begin

    def _begin(self, x: Tensor) -> int:
        size = self.layout.groups[self.index].dtype.itemsize
        return int(x.storage_offset()) * x.itemsize - self.start * size


def flats_of(
    program: RecordedStep, events: Mapping[fx.Node, Sequence[CollectiveEvent]]
) -> dict[int, Flat]:
    """Return the flat buffers of parameters, of the state and gathered, by storage key.

    events: of each collective, one for each buffer.
    """
    setups = program.setups
    found: dict[int, Flat] = {}

    def note(x: Tensor, setup: Setup, index: int, *, is_whole: bool) -> None:
        if x.numel():
            part = setup.part(setup.optimizer_state, program.rank)
            flat = Flat(setup.layout, index, int(x.storage_offset()), is_whole, part)
            found.setdefault(x.untyped_storage()._cdata, flat)

    for node, path in zip(inputs_of(list(program.graph.graph.nodes)), program.inputs, strict=True):
        if match := _FLAT.match(path):
            setup, index = setups[match[1]], int(match[2])
            whole = node.meta["val"].numel() == setup.layout.full_numel(index)
            note(node.meta["val"], setup, index, is_whole=whole)
    for node, about in events.items():
        if node.target is torch.ops.fzero.all_gather.default:
            for x, event in zip(node.meta["val"], about, strict=True):
                for one, index in _groups([*setups.values()], event.paths):
                    if x.numel() == one.layout.full_numel(index):
                        note(x, one, index, is_whole=True)
    return found


def is_params(path: str) -> bool:
    """Whether the path of an input is that of a flat buffer of parameters."""
    return _FLAT.match(path) is not None


def _groups(setups: Sequence[Setup], paths: Sequence[str]) -> list[tuple[Setup, int]]:
    wanted = [tuple(paths)]
    return [
        (setup, index)
        for setup in setups
        for index in range(len(setup.layout.groups))
        if setup.layout.paths([index]) == wanted
    ]


def index_of_view(node: fx.Node) -> str:
    """Return a view as an index of its input, such as "[:, 2]"; "" for all of it.

    Several views, of a split, are told apart by their numbers.
    """
    args: Any = node.args
    if node.target is _aten.select.int:
        return _index(args[1], str(args[2]), args[0])
    if node.target is _aten.slice.Tensor:
        size, given = node.meta["val"].numel(), args[0].meta["val"].numel()
        start, stop = (args[2] if len(args) > 2 else 0), (args[3] if len(args) > 3 else None)
        last = "" if stop is None or stop >= 2**62 else stop
        return "" if size == given else _index(args[1], f"{start or 0}:{last}", args[0])
    if node.target is _aten.diagonal.default:
        return ".diagonal"
    return ""


def _index(dim: int, what: str, of: fx.Node) -> str:
    ndim = of.meta["val"].ndim
    return f"[{':, ' * (dim % ndim)}{what}]"
