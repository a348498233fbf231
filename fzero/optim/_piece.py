"""Which elements of which flat belong to which leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.partition import named_leaves
from fzero.state import NAMESPACE
from fzero.state.layout import Leaf
from fzero.state.stateful_update import Piece as Piece


def pieces_in(pieces: Sequence[Piece], indices: Sequence[int]) -> list[Piece]:
    """Return the pieces of some parameters, numbered as those are in `indices`.

    Example:
        >>> import torch
        >>> from fzero.state.layout import Leaf
        >>> leaf = Leaf(path="w", shape=(4,), dtype=torch.float32, trainable=True)
        >>> pieces_in([Piece(0, leaf, 0, 4), Piece(1, leaf, 0, 2)], [1])[0].index
        0
    """
    number = {index: k for k, index in enumerate(indices)}
    return [p._replace(index=number[p.index]) for p in pieces if p.index in number]


def whole_leaves(
    grads: Any, params: Any
) -> tuple[list[Tensor], list[Tensor], list[Piece], optree.PyTreeSpec]:
    """Return the leaves of `params`, those of `grads`, a piece for each, and the structure.

    Raises `LayoutError` for another number of gradients.
    """
    paths, ps, treespec = named_leaves(params)
    gs = optree.tree_leaves(grads, namespace=NAMESPACE)
    if len(gs) != len(ps):
        raise LayoutError(
            f"update() got {len(gs)} gradients for {len(ps)} parameters.",
            cause="gradients of another model, or only of a part of it.",
            fix="give gradients of the same structure as the parameters.",
        )
    return ps, gs, [_whole(i, *one) for i, one in enumerate(zip(paths, ps, strict=True))], treespec


def _whole(i: int, path: str, p: Tensor) -> Piece:
    leaf = Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)
    return Piece(i, leaf, 0, p.numel())
