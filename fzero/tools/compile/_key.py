"""What a graph is made for: the structure of the arguments, their kinds, and what is one memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from fzero.context.modes import Ambient
from fzero.state import NAMESPACE

PLAIN = (
    *(Number, str, bytes, type(None), range, slice, type(...), np.generic, np.dtype, torch.dtype),
    *(torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Values that nothing can change."""


def key_of(arguments: Any) -> Any:
    """Return the cache key of arguments: structure, numbers, metadata and places of tensors.

    And the modes of torch under which ops give other results.
    """
    leaves, treespec = optree.tree_flatten(arguments, namespace=NAMESPACE)
    kinds = [_leaf(x) for x in leaves]
    places = shared_memory([x for x in leaves if isinstance(x, Tensor)])
    return treespec, kinds, places, Ambient.take(), [read() for read in _SWITCHES]


def told_apart(x: Any) -> Any:
    """Return what is equal for values that a step cannot tell apart, and for one object.

    Example:
        >>> [told_apart(x) == told_apart(y) for x, y in ((1, 1), (1, True), (0.0, -0.0), ([], []))]
        [True, False, False, False]
    """
    if isinstance(x, float | complex):
        return type(x), repr(x)
    if isinstance(x, np.ndarray):
        return x.dtype, x.shape, x.tobytes()
    if isinstance(x, PLAIN):
        return type(x), x
    return (type(x), [*map(told_apart, x)]) if isinstance(x, tuple) else _Itself(x)


def _leaf(x: Any) -> Any:
    """Return what an argument is told apart by: records of the same values are alike."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts: Any = object.__getstate__(x)
        return type(x), [*map(told_apart, optree.tree_leaves(parts, none_is_leaf=True))]
    return _kind(x) if isinstance(x, Tensor) else told_apart(x)


class _Itself:
    """Equal to the same object alone."""

    def __init__(self, it: Any) -> None:
        self._it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._it is self._it

    __hash__ = None  # type: ignore[assignment]


_SWITCHES = (
    *(torch.get_default_dtype, torch.get_num_threads, torch.are_deterministic_algorithms_enabled),
    *(torch.get_float32_matmul_precision, torch.is_autocast_cache_enabled),
    *(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled),
    *(torch.backends.cuda.mem_efficient_sdp_enabled, torch._C._get_mkldnn_enabled),
    *(torch._C._get_cudnn_enabled, torch._C._get_cudnn_deterministic),
    *(torch._C._get_cudnn_benchmark, torch.backends.mha.get_fastpath_enabled),
)
"""The switches of torch by which ops are chosen while a step is recorded."""


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
