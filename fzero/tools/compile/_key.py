"""What a graph is made for: the structure of the arguments, their kinds, and what is one memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.context.ambient import Ambient
from fzero.state import NAMESPACE
from fzero.transforms.closure import told_apart


def key_of(arguments: Any) -> Any:
    """Return the cache key of arguments: structure, numbers, metadata and places of tensors.

    And the modes of torch under which ops give other results.
    """
    leaves, treespec = optree.tree_flatten(arguments, namespace=NAMESPACE)
    kinds = [_kind(x) if isinstance(x, Tensor) else told_apart(x) for x in leaves]
    places = shared_memory([x for x in leaves if isinstance(x, Tensor)])
    return treespec, kinds, places, Ambient.take(), torch.get_default_dtype()


def _kind(x: Tensor) -> Any:
    return tuple(x.shape), x.stride(), x.dtype, x.device


def shared_memory(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return which of some tensors overlap, how, and which are one, by their positions.

    Example:
        >>> import torch
        >>> x = torch.ones(4)
        >>> shared_memory([x, torch.ones(4)]), shared_memory([x, x[2:], x])
        ((), (((0, 0, 0), (2, 0, 0), (1, 8, 1)),))
    """
    spans = sorted(
        (start, i, x) for i, x in enumerate(tensors) if x.numel() and (start := x.data_ptr())
    )
    first = {id(x): i for i, x in reversed([*enumerate(tensors)])}
    groups: list[list[tuple[int, int, int]]] = []
    base = end = 0
    for start, i, x in spans:
        if start >= end:
            groups.append([])
            base = start
        groups[-1].append((i, start - base, first[id(x)]))
        end = max(end, start + _extent(x))
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _extent(x: Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one."""
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (1 + reach) * x.itemsize
