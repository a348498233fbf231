"""Which elements of which logical tensor a rank holds: pure, and views only.

A leaf of n elements is saved as a 1-D tensor of n elements, whatever its shape: a shard cuts
leaves at any element, and in one dim every cut is a range. Every rank writes, and reads, only
its part of every group (`Setup.part`, over all ranks), also where it holds more: so the work is
shared at every stage, and replicas write nothing twice. Ranges
are cut again at every multiple of BLOCK_NUMEL: DCP reads saved ranges whole, and so nobody holds
more than that of a leaf that is not its own.

    a part of each group --cut_shards--> ranges of leaves
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.machine.by_path import leaf_paths
from fzero.machine.packing import LeafRange, leaf_ranges
from fzero.state import Layout, Part
from fzero.state.layout import Leaf, as_complex, as_real

BLOCK_NUMEL = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Elements `start` to `start + len(values)` of the logical tensor `name`."""

    name: str
    start: int
    numel: int  # of the logical tensor
    values: Tensor  # a view of what the rank holds


class OwnShard(NamedTuple):
    """A part of a flat that a state keeps, of one group."""

    prefix: str  # before the names of leaves
    group: int
    part: Part  # of the group's flat
    values: Tensor  # of this part, a view of what the rank holds


def cut_shards(layout: Layout, shards: Sequence[OwnShard]) -> Iterator[TensorPiece]:
    """Cut shards at the borders of leaves and blocks; padding is in no piece."""
    names = leaf_paths(layout)
    for prefix, index, part, values in shards:
        for held in leaf_ranges(layout, index, part):
            name, leaf = f"{prefix}/{names[held.leaf]}", layout.leaves[held.leaf]
            here, first, last, numel = held.of(values), held.start, held.stop, leaf.numel
            if leaf.dtype.is_complex and here.dtype.itemsize >= 4:  # as its user has it
                here, first, last, numel = as_complex(here), first // 2, last // 2, numel // 2
            for start, stop in blocks(first, last, BLOCK_NUMEL):
                block = here[start - first : stop - first]
                yield TensorPiece(name=name, start=start, numel=numel, values=block)


def whole_pieces(name: str, x: Tensor) -> Iterator[TensorPiece]:
    """Yield all of a tensor."""
    flat = x.reshape(-1)
    for start, stop in blocks(0, flat.numel(), BLOCK_NUMEL):
        yield TensorPiece(name=name, start=start, numel=flat.numel(), values=flat[start:stop])


def blocks(low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut low..high at the multiples of `size`; nothing if it is empty."""
    while low < high:
        stop = min(high, (low // size + 1) * size)
        yield low, stop
        low = stop


class Overlap(NamedTuple):
    """Which elements of a range have a value in a tensor of another shape, and where."""

    here: Tensor  # [n] bool, of the range
    there: Tensor  # [m] of each of those: the element of the other tensor

    def fill(self, target: Tensor, values: Tensor, first: int = 0) -> None:
        """Set them. values: of the other tensor, from its element `first` on."""
        found = values[self.there - first].to(target.device, target.dtype)
        target[self.here.to(target.device)] = found


def overlap(start: int, numel: int, own: tuple[int, ...], other: tuple[int, ...]) -> Overlap:
    """Return it, for `numel` elements of a tensor of shape `own` from `start` on.

    Example:
        >>> here, there = overlap(0, 4, (2, 2), (5, 3))
        >>> here.tolist(), there.tolist()
        ([True, True, True, True], [0, 1, 3, 4])
    """
    rest = torch.arange(start, start + numel, device="cpu")
    here, there, stride = torch.ones_like(rest, dtype=torch.bool), torch.zeros_like(rest), 1
    for size, known in zip(reversed(own), reversed(other), strict=True):
        at, rest = rest % size, rest // size
        here &= at < known
        there += at * stride
        stride *= known
    return Overlap(here, there[here])


def put_common(leaf: Leaf, found: Tensor, own: LeafRange, target: Tensor, codec: Any) -> None:
    """Set what of a leaf is in `found`, of another shape, too."""
    found, first, stop = as_real(found), own.start, own.stop
    if codec is not None:
        first, stop = (x // codec.block_bytes * codec.block for x in (first, stop))
    numbers = target if codec is None else codec.numbers(target).clone()
    common = overlap(first, min(stop, leaf.numel) - first, leaf.stored_shape, tuple(found.shape))
    common.fill(numbers[: common.here.numel()], found.reshape(-1))
    if codec is not None:
        codec.write(target, numbers)
