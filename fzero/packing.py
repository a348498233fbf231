"""One group: its leaves <-> its flat padded buffer [W l], with and without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.state.layout import Layout


def pack(layout: Layout, index: int, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the leaves of group `index` into its flat [W l] buffer.

    A group of one leaf without padding is only reshaped, not copied.
    """
    group = layout.groups[index]
    pieces, end = [], 0
    for tensor, offset in zip(tensors, group.offsets, strict=True):
        if offset > end:
            pieces.append(tensor.new_zeros(offset - end))
        pieces.append(tensor.reshape(-1))
        end = offset + tensor.numel()
    if layout.full_numel(index) > end:
        pieces.append(tensors[0].new_zeros(layout.full_numel(index) - end))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unpack(layout: Layout, index: int, flat: Tensor) -> list[Tensor]:
    """Cut the flat [W l] buffer of group `index` into its leaves: views, and one split.

    `flat` may have the `seat_shape` of the group.
    """
    group = layout.groups[index]
    leaves = [layout.leaves[i] for i in group.leaves]
    if len(leaves) == 1 and leaves[0].numel == layout.full_numel(index):
        same = tuple(flat.shape) == leaves[0].shape  # a view of it would cost a copy in backward
        return [flat if same else flat.view(leaves[0].shape)]
    sizes, wanted, end = [], [], 0
    for leaf, offset in zip(leaves, group.offsets, strict=True):
        if offset > end:
            sizes.append(offset - end)
        wanted.append(len(sizes))
        sizes.append(leaf.numel)
        end = offset + leaf.numel
    sizes.append(flat.numel() - end)
    pieces = flat.split(sizes)
    return [pieces[i].view(leaf.shape) for i, leaf in zip(wanted, leaves, strict=True)]


def pack_copied(layout: Layout, index: int, tensors: Sequence[Tensor | None]) -> Tensor:
    """`pack` in one pass over memory, outside of autograd; None stands for zeros.

    Gradients of matrices arrive transposed: concatenating them would copy them twice.
    """
    group = layout.groups[index]
    like = next(t for t in tensors if t is not None)
    if len(tensors) == 1 and like.numel() == layout.full_numel(index):
        return like.reshape(-1)
    given = [t for t in tensors if t is not None and t.is_contiguous()]
    if len(given) == len(tensors):
        return pack(layout, index, given)
    flat = like.new_empty(layout.full_numel(index))
    end = 0
    for leaf, offset, tensor in zip(group.leaves, group.offsets, tensors, strict=True):
        flat[end:offset].zero_()
        end = offset + layout.leaves[leaf].numel
        if tensor is None:
            flat[offset:end].zero_()
        else:
            flat[offset:end].view(tensor.shape).copy_(tensor)
    flat[end:].zero_()
    return flat


class _Cut(torch.autograd.Function):
    """flat -> its leaves, as views; backward packs their gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, layout: Layout, index: int) -> tuple[Tensor, ...]:
        ctx.layout, ctx.index = layout, index
        ctx.set_materialize_grads(False)
        return tuple(unpack(layout, index, flat))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return pack_copied(ctx.layout, ctx.index, grads), None, None


def cut(layout: Layout, index: int, flat: Tensor) -> list[Tensor]:
    """`unpack` for one backward pass of ordinary autograd, and for that only."""
    if seat_shape(layout, index) == layout.leaves[layout.groups[index].leaves[0]].shape:
        return unpack(layout, index, flat)
    return list(_Cut.apply(flat, layout, index))


def seat_shape(layout: Layout, index: int) -> tuple[int, ...]:
    """Return the shape to differentiate group `index` by: its leaf's own if it is just one.

    A matrix product hands out a transposed gradient; by a flat view of the leaf autograd would
    have to copy it before it can be added up.
    """
    group = layout.groups[index]
    leaf = layout.leaves[group.leaves[0]]
    whole = len(group.leaves) == 1 and leaf.numel == layout.full_numel(index)
    return leaf.shape if whole else (layout.full_numel(index),)
