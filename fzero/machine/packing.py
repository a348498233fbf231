"""One group: leaves <-> flat padded buffer [W l] <-> a rank's part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from fzero.collectives import gather_many, reduce_many, scatter_many, start_gather_in_place
from fzero.context.modes import is_recorded
from fzero.ranks.mesh import Axis
from fzero.state import Placement, Setup
from fzero.state.layout import Layout, Leaf, Part, as_real

ALIGNMENT_BYTES = 16
"""Where leaves and shards may start in a flat: vectorized CUDA kernels load 16 bytes at once, and
tensors that start elsewhere take slower ones. A flat itself starts on more than that."""


def in_order(
    numels: Sequence[int], ranks: int, alignment: int = 1, *, block: int = 1
) -> tuple[tuple[int, ...], int]:
    """Place leaves one behind the other; each leaf, and each shard, starts on the alignment.

    Returns (offset of each leaf, shard_numel); `alignment` is in elements. A leaf is padded by less
    than `alignment` elements, and the end of the flat by less than `ranks alignment`. On one rank
    no shard starts behind the first, so its end is not padded.

    With a `block` each leaf and each shard consists of whole blocks, also on one rank: they start
    on a multiple of both, and what follows is padding to the end of a block.

    Example:
        >>> in_order([3, 4], 2, alignment=4)
        ((0, 4), 4)
        >>> in_order([3, 4], 1, alignment=4)
        ((0, 4), 8)
        >>> in_order([3, 5], 1, alignment=4, block=8)
        ((0, 8), 16)
    """
    alignment = lcm(alignment, block)
    offsets, end = [], 0
    for numel in numels:
        offsets.append(_rounded_up(end, alignment))
        end = offsets[-1] + numel
    shard_numel = -(-end // ranks)
    padded = ranks > 1 or block > 1
    return tuple(offsets), _rounded_up(shard_numel, alignment) if padded else shard_numel


def _rounded_up(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def pack(layout: Layout, index: int, tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the leaves of group `index` into its flat [W l] buffer, complex ones as real.

    A group of one leaf without padding is only reshaped, not copied. Leaves that are encoded are so
    one after another: of an iterator that makes them, one is there at a time.
    """
    left, pieces = iter(tensors), list[Tensor]()
    for numel, leaf in _pieces(layout, index):
        pieces.append(pieces[0].new_zeros(numel) if leaf is None else leaf.stored(next(left)))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unpack(layout: Layout, index: int, flat: Tensor) -> list[Tensor]:
    """Cut the flat [W l] buffer of group `index` into its leaves: views, and one split; or decode.

    `flat` may have the `input_shape` of the group.
    """
    group = layout.groups[index]
    leaves = [layout.leaves[i] for i in group.leaves]
    if len(leaves) == 1 and leaves[0].numel == layout.full_numel(index):
        same = tuple(flat.shape) == leaves[0].shape is leaves[0].stored_shape
        return [flat if same else leaves[0].of(flat)]  # a view would cost a copy in backward
    return [leaf.of(x) for leaf, x in stored_leaves(layout, index, flat)]


def stored_leaves(layout: Layout, index: int, flat: Tensor) -> list[tuple[Leaf, Tensor]]:
    """Cut the flat [W l] buffer of group `index` into what it has of each leaf: views [n]."""
    pieces = _pieces(layout, index)
    cut = flat.split([numel for numel, _ in pieces])
    return [(leaf, x) for x, (_, leaf) in zip(cut, pieces, strict=True) if leaf is not None]


def unpack_groups(layout: Layout, flats: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """{group: its flat [W l]} -> {leaf: its tensor}, views of the flats."""
    found: dict[int, Tensor] = {}
    for index, flat in flats.items():
        found.update(zip(layout.groups[index].leaves, unpack(layout, index, flat), strict=True))
    return found


def _pieces(layout: Layout, index: int) -> list[tuple[int, Leaf | None]]:
    """Return what is in the flat of group `index`, in order: elements of a leaf, or of padding."""
    group, end = layout.groups[index], 0
    pieces: list[tuple[int, Leaf | None]] = []
    for leaf, offset in zip(group.leaves, group.offsets, strict=True):
        if offset > end:
            pieces.append((offset - end, None))
        pieces.append((layout.leaves[leaf].numel, layout.leaves[leaf]))
        end = offset + layout.leaves[leaf].numel
    if layout.full_numel(index) > end:
        pieces.append((layout.full_numel(index) - end, None))
    return pieces


def shard_of(full: Tensor, ranks: int, rank: int) -> Tensor:
    """Return rank's rows of a flat [W l] buffer: a view [l].

    Example:
        >>> shard_of(torch.arange(6), 3, 1)
        tensor([2, 3])
    """
    return rearrange(full, "(r l) -> r l", r=ranks)[rank]


def part_of(flat: Tensor, held: Part, wanted: Part) -> Tensor:
    """Return part `wanted` of a flat, as a view of part `held`, which contains it.

    Example:
        >>> part_of(torch.tensor([4, 5, 6, 7]), Part(2, 1), Part(4, 2))
        tensor([4, 5])
    """
    count = wanted.count // held.count
    return shard_of(flat, count, wanted.index % count)


class LeafRange(NamedTuple):
    """The elements of one leaf that lie in a part of its group's flat."""

    position: int  # of the leaf in its group
    leaf: int
    start: int  # of the leaf's elements, as is stop
    stop: int
    at: int  # where the first of them is in the part

    def of(self, held: Tensor) -> Tensor:
        """Return these elements of a part that a rank holds: a view."""
        return held[self.at : self.at + self.stop - self.start]


def leaf_ranges(layout: Layout, index: int, part: Part) -> Iterator[LeafRange]:
    """Yield the range of each leaf that lies in a part of the flat of group `index`.

    Padding is in none.
    """
    group, numel = layout.groups[index], layout.full_numel(index) // part.count
    begin = part.index * numel
    for position, (leaf, offset) in enumerate(zip(group.leaves, group.offsets, strict=True)):
        start = max(begin - offset, 0)
        stop = min(begin + numel - offset, layout.leaves[leaf].numel)
        if start < stop:
            yield LeafRange(position, leaf, start, stop, start + offset - begin)


def without_padding(layout: Layout, index: int, part: Part, held: Tensor) -> Tensor:
    """Return a part of a flat, new memory of the caller's, with zeros where no leaf is."""
    end, held = 0, held.contiguous()
    for one in sorted(leaf_ranges(layout, index, part), key=lambda one: one.at):
        if end < one.at:
            held[end : one.at] = 0
        end = one.at + one.stop - one.start
    if end < held.numel():
        held[end:] = 0
    return held


def pack_copied(
    layout: Layout, index: int, tensors: Sequence[Tensor | None], *, divisor: float | None = None
) -> Tensor:
    """`pack` in one pass over memory, outside of autograd; None stands for zeros.

    Gradients of matrices may arrive transposed: concatenating them would copy them twice. With a
    `divisor` the flat is new memory, also of a group that is not copied otherwise.
    """
    like = next(t for t in tensors if t is not None)
    alone = len(tensors) == 1 and like.numel() == layout.full_numel(index)
    if alone and divisor is None:
        return as_real(like).reshape(-1)
    recorded = is_recorded([like])  # whoever compiles that makes one pass of it
    given = [t for t in tensors if t is not None and (recorded or t.is_contiguous())]
    pieces, left = _pieces(layout, index), iter(tensors)
    if len(given) == len(tensors) and divisor in (None, 1.0) and not alone:
        reals = [as_real(x) if x.is_complex() else x for x in given]
        padding, left = reals[0].new_zeros, iter(reals)
        flats = [padding(n) if leaf is None else next(left).reshape(-1) for n, leaf in pieces]
        return torch.cat(flats)
    flat = as_real(like).new_empty(layout.full_numel(index))
    for x, (_, leaf) in zip(flat.split([numel for numel, _ in pieces]), pieces, strict=True):
        tensor = None if leaf is None else next(left)
        if leaf is None or tensor is None:
            x.zero_()
        elif divisor in (None, 1.0):
            leaf.of(x).copy_(tensor)
        elif tensor.is_contiguous():
            torch.div(tensor, divisor, out=leaf.of(x))
        else:  # only a copy transposes fast; then divided while it is in the processor's cache
            leaf.of(x).copy_(tensor).div_(divisor)
    return flat


def input_shape(layout: Layout, index: int) -> tuple[int, ...]:
    """Return the shape to differentiate group `index` by: its leaf's own if it is just one.

    A matrix product hands out a transposed gradient; by a flat view of the leaf autograd would
    have to copy it before it can be added up.
    """
    group = layout.groups[index]
    leaf = layout.leaves[group.leaves[0]]
    whole = len(group.leaves) == 1 and leaf.numel == layout.full_numel(index)
    return leaf.stored_shape if whole else (layout.full_numel(index),)


def with_own_storage(x: Tensor) -> Tensor:
    """Return a contiguous view as a tensor with a storage of its own on the same memory.

    What writes a storage (torch.save, pickle, copy.deepcopy, safetensors) writes the elements of
    `x` then, and not the flat around them. The flat lives as long as what is returned. A tensor
    without values is returned as it is.

    Example:
        >>> flat = torch.arange(8.0)
        >>> own = with_own_storage(flat[2:5])
        >>> _ = flat.mul_(2)
        >>> own, own.untyped_storage().nbytes()
        (tensor([4., 6., 8.]), 12)
    """
    if type(x) is not Tensor or x.is_meta or not x.numel():
        return x
    return (
        torch.from_dlpack(to_dlpack(x.detach().view(-1).view(torch.uint8)))
        .view(x.dtype)
        .view(x.shape)
    )


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (0x5851F42D4C957F2D, -4658895280553007687, -7723592293110705685)


def digest(x: Tensor, start: int = 0) -> int:
    """Return 64 bits that are equal for equal bits of `x`, and nearly never for others.

    sum_i mix(i, w_i) modulo 2^64 over words w_i of 64 bits: computed where `x` is, in any order.
    The sum over the parts of a tensor is that of the whole.

    start: of a part, how many elements are before it. Each part but the last is whole words.

    Example:
        >>> x = torch.arange(4.0)
        >>> digest(x) == digest(x.clone()), digest(x) == digest(x.flip(0))
        (True, False)
        >>> digest(x) == (digest(x[:2]) + digest(x[2:], start=2)) % 2**64
        True
    """
    return int(hashed(x, start)) % 2**64


def hashed(x: Tensor, start: int = 0) -> Tensor:
    """Return what `digest` does as a number [] where `x` is, for which the host does not wait."""
    real = as_real(x.detach()).contiguous()
    data = real.as_strided([real.numel()], [1]).view(torch.uint8)  # one element has any stride
    left = data.numel() % 8  # the last word has zeros at its end
    if left or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-left % 8)])
    words, first = data.view(torch.int64), start * real.element_size() // 8
    at_once = 2**16 if data.device.type == "cpu" else 2**22  # they stay in the processor's cache
    total = words.new_zeros(())
    for begin in range(0, words.numel(), at_once):
        some = words[begin : begin + at_once]
        at = first + begin
        mixed = torch.arange(at + 1, at + 1 + some.numel(), device=words.device)
        mixed.mul_(_ODD[0]).bitwise_xor_(some).mul_(_ODD[1])
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF)).mul_(_ODD[2])
        total += mixed.sum()
    return total


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each tensor: the sum of its elements' bits as integers, in one pass.

    Example:
        >>> checksums([torch.tensor([1, 2]), torch.tensor([1, 3])])
        [3, 4]
    """
    sums = []
    for x in tensors:
        real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        bits = real.contiguous().view(-1).view(_BITS[real.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums).tolist() if sums else []  # one read from the device


# Reshard flat buffers between placements: cut to a smaller part, gather a larger one.
#
#     REPLICATED [S l]  <- gather over shards -  SHARDED [l]  <- over replicas -  OVER_ALL [l / R]
#                        - cut ->                              - cut ->
#
# The sum over ranks goes the same way: over the shards of a replica, then over the replicas.


def over_places(setup: Setup, x: Tensor) -> Tensor:
    """Return the sum over the places of a mesh of what is equal on the ranks of each.

    A collective of all the mesh for a state on a part of one; else x itself.
    """
    mesh = setup.axis.mesh
    if mesh is None:
        return x
    return reduce_many([x], mesh, ordered=setup.reduction.ordered)[0] / setup.axis.size


def cut(setup: Setup, flat: Tensor, held: Placement, to: Placement) -> Tensor:
    """Return this rank's part of a flat under placement `to`: a view of that under `held`."""
    if held is to:
        return flat
    rank = setup.axis.rank
    return part_of(flat, setup.part(held, rank), setup.part(to, rank))


def gather_parts(
    setup: Setup, flats: Sequence[Tensor], held: Placement, to: Placement
) -> list[Tensor]:
    """Gather parts under placement `held` into larger parts under `to`. Adjoint: sum and cut."""
    for axis, _ in _steps(setup, held, to):
        flats = gather_many(flats, axis)
    return list(flats)


def gather_parts_in_place(
    setup: Setup, flats: Sequence[Tensor], held: Placement, to: Placement
) -> None:
    """Gather in place into `flats`, in which this rank's part (`held`) is filled already."""
    for axis, made in _steps(setup, held, to):
        start_gather_in_place([cut(setup, flat, to, made) for flat in flats], axis).wait()


def sum_parts(setup: Setup, flats: Sequence[Tensor]) -> list[Tensor]:
    """Each [S l] -> this rank's part of the sum over ranks, as gradients are placed.

    By collectives that torch.func differentiates.
    """
    axis, ordered = setup.axis, setup.reduction.ordered
    if setup.reduces_in_place:
        return reduce_many(flats, axis, ordered=ordered)
    flats = scatter_many(flats, axis.shards, ordered=ordered)
    across = scatter_many if setup.gradients is Placement.OVER_ALL else reduce_many
    return across(flats, axis.replicas, ordered=ordered)


def _steps(setup: Setup, held: Placement, to: Placement) -> list[tuple[Axis, Placement]]:
    """The axes to gather over, in order, each with the placement after it."""
    steps = []
    if held is Placement.OVER_ALL and to is not held:
        steps.append((setup.axis.replicas, Placement.SHARDED))
    if to is Placement.REPLICATED and to is not held:
        steps.append((setup.axis.shards, Placement.REPLICATED))
    return steps
