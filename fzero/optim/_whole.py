"""Whole leaves in flats, for a rule that needs their shapes: cut out, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.optim._piece import Piece
from fzero.state._record import NAMESPACE


def leaves_in(flats: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the leaves that are in flats, each in its own shape: views.

    Example:
        >>> from fzero.state.layout import Leaf
        >>> leaf = Leaf(path="w", shape=(2, 2), dtype=torch.float32, trainable=True)
        >>> leaves_in([torch.arange(8)], [Piece(0, leaf, 0, 8)])  # with padding behind it
        [tensor([[0, 1],
                [2, 3]])]
    """
    return [_leaf_in(flats, piece) for piece in pieces]


def as_flats(tree: Any, flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Any:
    """Return a tree with flats, padding zero, for each list in it that has a tensor as each leaf.

    flats: of the parameters; only their sizes count.
    """

    def is_leaves(node: Any) -> bool:
        return _fits(node, [piece.leaf.shape for piece in pieces])

    def packed(node: Any) -> Any:
        mine: list[list[Tensor]] = [[] for _ in flats]
        ends = [0] * len(flats)
        for piece, x in zip(pieces, node, strict=True):
            if piece.start > ends[piece.index]:
                mine[piece.index].append(x.new_zeros(piece.start - ends[piece.index]))
            mine[piece.index].append(x.reshape(-1))
            ends[piece.index] = piece.start + x.numel()
        for some, end, flat in zip(mine, ends, flats, strict=True):
            if flat.numel() > end:
                some.append(some[0].new_zeros(flat.numel() - end))
        return type(node)(some[0] if len(some) == 1 else torch.cat(some) for some in mine)

    return _mapped(tree, is_leaves, packed)


def as_leaves(tree: Any, flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Any:
    """Return what `as_flats` was given."""

    def are_flats(node: Any) -> bool:
        return _fits(node, [(flat.numel(),) for flat in flats])

    return _mapped(tree, are_flats, lambda node: type(node)(leaves_in(node, pieces)))


def _leaf_in(flats: Sequence[Tensor], piece: Piece) -> Tensor:
    stop = piece.start + piece.leaf.numel
    return flats[piece.index].view(-1)[piece.start : stop].view(piece.leaf.shape)


def _fits(node: Any, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether it is a list, or a plain tuple, of tensors of these shapes."""
    if type(node) not in (list, tuple) or len(node) != len(shapes):
        return False
    pairs = zip(node, shapes, strict=True)
    return all(isinstance(x, Tensor) and x.shape == tuple(shape) for x, shape in pairs)


def _mapped(tree: Any, chosen: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    return optree.tree_map(
        lambda x: change(x) if chosen(x) else x, tree, is_leaf=chosen, namespace=NAMESPACE
    )
