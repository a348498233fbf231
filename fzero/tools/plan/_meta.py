"""What torch does otherwise with tensors on the meta device than with those that they stand for.

Of meta tensors, torch takes the unfused formula of attention, which makes every score at once,
[batch, heads, queries, keys]. And what a loss makes without saying where (`torch.arange(n)`) must
be with its other tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from fzero.tools.plan import _constants as constants
from fzero.tools.plan._values import READERS
from fzero.tools.trace.program import reads_values


class AsOn(TorchFunctionMode):
    """In this block, and in what it recomputes in a backward, meta tensors are as on `device`.

    New tensors are meta tensors, and `scaled_dot_product_attention` takes the memory of a fused
    kernel where torch has one on that device: that of the result, and one number for each query.
    """

    def __init__(self, device: str) -> None:
        """Take the kind of device that meta tensors stand for."""
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or what it would be on the device."""
        kwargs = dict(kwargs or {})
        if (composed := _without_dispatch(func)) is not None:
            with self:
                return composed(*args, **kwargs)
        if func in READERS and args[0].is_meta and not constants.is_known(args[0]):
            raise reads_values("planned", f"Tensor.{func.__name__}")
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return constants.call_abstractly(func, args, kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        return _fused(given) if self._fuses(given) else func(*args, **kwargs)

    def _fuses(self, given: Mapping[str, Any]) -> bool:
        query, mask = given["query"], given.get("attn_mask")
        plain = query.is_meta and query.ndim == 4 and query.numel() > 0
        learned = isinstance(mask, Tensor) and mask.requires_grad
        drops = given.get("dropout_p", 0.0) > 0 and self._device == "cpu"
        wide = query.dtype is torch.float64 and self._device != "cpu"
        return plain and not (learned or drops or wide)


@functools.cache
def _without_dispatch(func: Any) -> Callable[..., Any] | None:
    """Return a function of torch that is written in Python, so that a mode sees what it calls.

    Such a function asks whether somebody overrides it, hands itself to the mode, and runs without
    the mode: attention inside of `nn.MultiheadAttention`, what a checkpoint computes in a backward.
    The copy does not ask. None: it is no such function. (A method is none: it may call that of its
    base class, which hands itself to the mode under the same name.)
    """
    if not isinstance(func, FunctionType) or func.__qualname__ != func.__name__:
        return None
    if not _ASKS.intersection(func.__code__.co_names, func.__globals__):
        return None
    around = func.__globals__ | dict.fromkeys(_ASKS, lambda *_: False)
    made = FunctionType(func.__code__, around, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


_ASKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def _fused(given: Mapping[str, Any]) -> Tensor:
    query, mask = given["query"], given.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)  # it is turned into what is added
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        given["key"],
        given["value"],
        given.get("dropout_p", 0.0),
        given.get("is_causal", False),
        attn_mask=mask,
        scale=given.get("scale"),
    )
    return out
