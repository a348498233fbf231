"""What torch does otherwise with tensors on the meta device than with those that they stand for.

Of meta tensors, torch takes the unfused formula of attention, which makes every score at once,
[batch, heads, queries, keys]. And what a loss makes without saying where (`torch.arange(n)`) must
be with its other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from fzero.plan import _constants as constants


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
        if func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        if func is Tensor.backward:
            with AsOn(self._device):
                return torch.autograd.backward(*args, **kwargs)
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return constants.run(func, args, kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        return _fused(given) if self._fuses(given) else func(*args, **kwargs)

    def _backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`torch.autograd.backward`, for which torch would leave this mode.

        What a checkpoint computes in it would then not be as it was in the forward.
        """
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or ())
        given += [None] * (len(roots) - len(given))
        pairs = zip(roots, given, strict=True)
        grads = tuple(torch.ones_like(x) if g is None else g for x, g in pairs)
        by = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
        keep = create_graph if retain_graph is None else retain_graph
        with AsOn(self._device):
            _engine_run_backward(
                tuple(roots),
                grads,
                keep,
                create_graph,
                by,
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _fuses(self, given: Mapping[str, Any]) -> bool:
        query, mask = given["query"], given.get("attn_mask")
        plain = query.is_meta and query.ndim == 4 and query.numel() > 0
        learned = isinstance(mask, Tensor) and mask.requires_grad
        drops = given.get("dropout_p", 0.0) > 0 and self._device == "cpu"
        wide = query.dtype is torch.float64 and self._device != "cpu"
        return plain and not (learned or drops or wide)


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
