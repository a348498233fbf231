"""Compute in float64 what was written for narrower dtypes: casts between floats do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.machine.placeholder import LazyParam

WIDE = torch.float64


class Widened(TorchDispatchMode):
    """Context in which ops that are asked for another dtype of floats give float64.

    So `x.float()`, `x.to(torch.bfloat16)` and `softmax(x, -1, dtype=torch.float32)` do not round,
    in forwards, backwards and what a backward computes again; complex numbers are complex128.
    Beside a tensor of float64 a narrower one is cast, which a matrix product would refuse. What is
    written in place keeps its dtype, and how bits are read is left alone.

    looks: whether what is computed now is to be wide.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64) / 3
        >>> with Widened():
        ...     y = x.bfloat16().float()
        >>> torch.equal(x, y)
        True
    """

    def __init__(self, looks: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._looks = looks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op with wide dtypes and tensors."""
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        if not self._looks() or func is torch.ops.aten.view.dtype:
            return func(*args, **(kwargs or {}))
        named = {key: _dtype(x) for key, x in (kwargs or {}).items()}
        return func(*_together(func, args), **named)


def _dtype(x: Any) -> Any:
    """Return the wide dtype for one of floats or complex numbers; anything else as it is."""
    if not isinstance(x, torch.dtype):
        return x
    return WIDE if x.is_floating_point else torch.complex128 if x.is_complex else x


def _together(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the arguments with wide dtypes, and all floats in float64 if one is."""
    asked = [_dtype(x) for x in args]
    flat = [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]
    if not any(isinstance(x, Tensor) and x.dtype is WIDE for x in flat):
        return asked
    schema = func._schema.arguments
    writes = [one.alias_info is not None and one.alias_info.is_write for one in schema]
    return [x if w else _wide(x) for x, w in zip(asked, writes, strict=False)]


def _wide(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_wide(y) for y in x]
    narrow = isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype is not WIDE
    return torch.ops.aten._to_copy.default(x, dtype=WIDE) if narrow else x
