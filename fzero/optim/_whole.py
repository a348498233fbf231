"""Convert between flats and leaves in their own shapes, for rules that need these shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor
from torch.nn.functional import pad

from fzero.optim._piece import Piece
from fzero.state import NAMESPACE


def leaves_in(flats: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Return each leaf as a view of its flat, in its own shape.

    Example:
        >>> import torch
        >>> from fzero.state.layout import Leaf
        >>> leaf = Leaf(path="w", shape=(2, 2), dtype=torch.float32, trainable=True)
        >>> leaves_in([torch.arange(8)], [Piece(0, leaf, 0, 8)])  # with padding behind it
        [tensor([[0, 1],
                [2, 3]])]
    """
    own = ((flats[index].view(-1)[start:], leaf) for index, leaf, start, *_ in pieces)
    return [flat[: leaf.numel].view(leaf.shape) for flat, leaf in own]


def as_flats(tree: Any, flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Any:
    """Return the tree with each list of tensors shaped as the leaves flattened, padded by zeros.

    Every flat has one leaf. flats: those of the parameters, of which only the sizes are read.
    """

    def is_leaves(node: Any) -> bool:
        return _fits(node, [piece.leaf.shape for piece in pieces])

    def padded(node: Any) -> Any:
        pairs = zip(node, flats, strict=True)
        return type(node)(pad(x.reshape(-1), (0, flat.numel() - x.numel())) for x, flat in pairs)

    return _mapped(tree, is_leaves, padded)


def flats_in(tree: Any, flats: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return each list in a tree that has a tensor as long as each flat.

    Example:
        >>> import torch
        >>> flats_in({"mu": [torch.ones(2)], "count": torch.tensor(3)}, [torch.zeros(2)])
        [[tensor([1., 1.])]]
    """
    are_flats = _are_flats(flats)
    nodes: Any = optree.tree_leaves(tree, is_leaf=are_flats, namespace=NAMESPACE)
    return [list(node) for node in nodes if are_flats(node)]


def with_flats(tree: Any, flats: Sequence[Tensor], new: Sequence[Sequence[Tensor]]) -> Any:
    """Return the tree with `new` in place of the lists that `flats_in` returns, in their order."""
    own = iter(new)
    return _mapped(tree, _are_flats(flats), lambda node: type(node)(next(own)))


def as_leaves(tree: Any, flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Any:
    """Return the tree with each list of flats as leaves in their own shapes: undo `as_flats`."""
    return _mapped(tree, _are_flats(flats), lambda node: type(node)(leaves_in(node, pieces)))


def _are_flats(flats: Sequence[Tensor]) -> Callable[[Any], bool]:
    return lambda node: _fits(node, [(flat.numel(),) for flat in flats])


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
