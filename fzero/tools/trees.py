"""Pytrees of tensors: the tensors in them, copies, and what their values are told apart by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fzero.machine.packing import digest
from fzero.state import NAMESPACE
from fzero.state.layout import learns


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a pytree, in order."""
    leaves: list[Any] = optree.tree_leaves(tree, namespace=NAMESPACE)
    return [x for x in leaves if isinstance(x, Tensor)]


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a pytree with fn(x) in the place of each tensor, and all other leaves as they are.

    Example:
        >>> map_tensors(lambda x: x + 1, {"a": torch.ones(2), "b": "text"})
        {'a': tensor([2., 2.]), 'b': 'text'}
    """
    return optree.tree_map(
        lambda x: fn(x) if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE
    )


def copied(tree: Any) -> Any:
    """Return a pytree with its tensors cloned."""
    return map_tensors(lambda x: x.detach().clone(), tree)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Convert the floating tensors of a pytree to `dtype`."""
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def copy_of_tree(params: Any, dtype: torch.dtype) -> Any:
    """Return a copy with floating tensors in `dtype`; ties stay tied, frozen leaves frozen."""
    made: dict[int, Any] = {}

    def copy(leaf: Tensor) -> Any:
        if id(leaf) not in made:
            new = cast(leaf.detach(), dtype).clone()
            made[id(leaf)] = new if learns(leaf) else nn.Parameter(new, requires_grad=False)
        return made[id(leaf)]

    return map_tensors(copy, params)  # what is no tensor is refused by its path, elsewhere


def bits_of(tree: Any) -> list[Any]:
    """Return what is equal for pytrees of one structure and the same bits, leaf by leaf.

    Example:
        >>> bits_of([torch.zeros(1)]) == bits_of([torch.tensor([-0.0])])
        False
    """
    leaves, treespec = optree.tree_flatten(tree, namespace=NAMESPACE)

    def bits(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.dtype, x.shape, x.device, x.requires_grad, digest(x)
        return type(x), repr(x) if isinstance(x, float | complex) else x

    return [*map(bits, leaves), treespec]
