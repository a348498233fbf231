"""Make meta tensors take the code path, and so the memory, of tensors on a real device.

On the meta device torch computes attention without fusion, with all scores in memory, [batch,
heads, queries, keys]. And tensors that a loss creates without a device (`torch.arange(n)`) must be
on the meta device, too.
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
from fzero.tools.trace.found import LeftOver, Recorded
from fzero.tools.trace.program import reads_values

_TORCH: Any = torch
"""What torch has no public name for."""


class AsOn(TorchFunctionMode):
    """Context in which meta tensors behave as on `device`, also in recomputation by a backward.

    New tensors are meta tensors, and `scaled_dot_product_attention` has the memory of a fused
    kernel where torch has one on that device: the result, and one number for each query.
    """

    def __init__(self, device: str) -> None:
        """Set the type of device, "cpu" or "cuda", that meta tensors imitate."""
        super().__init__()
        self._device = device
        self._made = Recorded()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or its equivalent on the device."""
        kwargs = dict(kwargs or {})
        if (composed := _without_dispatch(func)) is not None:
            with self:
                return composed(*args, **kwargs)
        if func in READERS and args[0].is_meta and not constants.is_known(args[0]):
            raise reads_values("planned", f"Tensor.{func.__name__}")
        stays = bool(args) and isinstance(args[0], Tensor)  # as_tensor: where the tensor is
        if func in _device_constructors() and kwargs.get("device") is None and not stays:
            kwargs["device"] = "meta"
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return self._noted(constants.call_abstractly(func, args, kwargs), args)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        return self._noted(_fused(given) if self._fuses(given) else func(*args, **kwargs), args)

    def _noted(self, made: Any, args: tuple[Any, ...]) -> Any:
        return made if any(made is one for one in args) else self._made.note(made)

    def end(self) -> None:
        """The plan is over: whoever computes with a tensor that was made in it raises."""
        for x in self._made.left():
            if type(x) is Tensor and x.is_meta:
                x.__class__ = LeftOver

    def _fuses(self, given: Mapping[str, Any]) -> bool:
        query, mask = given["query"], given.get("attn_mask")
        plain = query.is_meta and query.ndim == 4 and query.numel() > 0
        learned = isinstance(mask, Tensor) and mask.requires_grad
        drops = given.get("dropout_p", 0.0) > 0 and self._device == "cpu"
        wide = query.dtype is torch.float64 and self._device != "cpu"
        return plain and not (learned or drops or wide)


@functools.cache
def _without_dispatch(func: Any) -> Callable[..., Any] | None:
    """Return a copy of a Python function of torch that does not dispatch; None for others.

    Such a function hands itself to the mode and then runs without it, so that the mode does not
    see its calls: attention in `nn.MultiheadAttention`, recomputation of a checkpoint. The copy
    runs in the mode. (Methods are excluded: one may call that of its base class, which hands
    itself to the mode under the same name.)
    """
    if not isinstance(func, FunctionType) or func.__qualname__ != func.__name__:
        return None
    if not _ASKS.intersection(func.__code__.co_names, func.__globals__):
        return None
    around = func.__globals__ | dict.fromkeys(_ASKS, lambda *_: False)
    made = FunctionType(func.__code__, around, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Write in place, where there are no values: nothing."""


_FUSED = torch.library.Library("aten", "IMPL", "Meta")
"""Fused updates that torch has on a device and not for tensors without values: no temporaries."""

for _name in ("_fused_sgd_", "_fused_adagrad_"):
    if not _TORCH._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _FUSED.impl(_name, _nothing)

_ASKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def _fused(given: Mapping[str, Any]) -> Tensor:
    query, mask = given["query"], given.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)  # as torch makes a mask to add
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
