"""Copies of pytrees, also in another dtype, so that the user's tensors are never changed."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor, nn

from fzero.state import NAMESPACE
from fzero.state.layout import learns


def copied(tree: Any) -> Any:
    """Return a pytree with its tensors cloned."""
    return optree.tree_map(
        lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE
    )


def copy_of_tree(params: Any, dtype: torch.dtype) -> Any:
    """Return a copy with floating tensors in `dtype`; ties stay tied, frozen leaves frozen."""
    made: dict[int, Tensor] = {}
    for leaf in optree.tree_leaves(params, namespace=NAMESPACE):
        made.setdefault(id(leaf), _copy_of(leaf, dtype))
    return optree.tree_map(lambda leaf: made[id(leaf)], params, namespace=NAMESPACE)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Convert the floating tensors of a pytree to `dtype`."""
    return optree.tree_map(lambda leaf: _cast(leaf, dtype), tree, namespace=NAMESPACE)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if floats else leaf


def _copy_of(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf  # named_leaves refuses it by its path
    made = _cast(leaf.detach(), dtype).clone()
    return made if learns(leaf) else nn.Parameter(made, requires_grad=False)
