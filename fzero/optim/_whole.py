"""Trees of a foreign pair: the lists in them that go with the parameters, as flats or as leaves."""

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

    def padded(node: Any) -> list[Tensor]:
        pairs = zip(node, flats, strict=True)
        return [pad(x.reshape(-1), (0, flat.numel() - x.numel())) for x, flat in pairs]

    return mapped(padded, [piece.leaf.shape for piece in pieces], tree)


def as_leaves(tree: Any, flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Any:
    """Return the tree with each list of flats as leaves in their own shapes: undo `as_flats`."""
    return mapped(lambda node: leaves_in(node, pieces), [(x.numel(),) for x in flats], tree)


def mapped(
    change: Callable[..., list[Tensor]], shapes: Sequence[Sequence[int]], tree: Any, *others: Any
) -> Any:
    """Return the tree with each list, or plain tuple, of tensors of these shapes changed.

    others: trees of the same structure; `change` gets what they have in the place of the list.

    Example:
        >>> import torch
        >>> tree = {"mu": [torch.ones(2)], "count": torch.tensor(3)}
        >>> mapped(lambda node: [2 * node[0]], [(2,)], tree)
        {'mu': [tensor([2., 2.])], 'count': tensor(3)}
    """

    def fits(node: Any) -> bool:
        if type(node) not in (list, tuple) or len(node) != len(shapes):
            return False
        pairs = zip(node, shapes, strict=True)
        return all(isinstance(x, Tensor) and x.shape == tuple(shape) for x, shape in pairs)

    def of(node: Any, *same: Any) -> Any:
        return type(node)(change(node, *same)) if fits(node) else node

    return optree.tree_map(of, tree, *others, is_leaf=fits, namespace=NAMESPACE)


def with_values(
    flats: Sequence[Tensor], pieces: Sequence[Piece], values: Sequence[Tensor]
) -> list[Tensor]:
    """Return the flats with the elements of each piece from `values`; others are the same."""
    touched = {piece.index for piece in pieces}
    made = [x.clone() if i in touched else x for i, x in enumerate(flats)]
    for (index, _, start, stop, _), x in zip(pieces, values, strict=True):
        made[index].view(-1)[start:stop].copy_(x)
    return made
