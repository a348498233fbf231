"""Raise a clear error at an operation that needs the values of tensors without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fzero.context.here import has_no_values
from fzero.tools.trace.program import reads_values

ASKED_OF_FAKE = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of fake tensors where values are needed. Meta tensors raise errors of any type."""

READERS = {torch.Tensor.numpy, torch.Tensor.__array__}
"""Functions that read values without calling an ATen op."""

_aten = torch.ops.aten
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten.copy.default)


class NoValues(TorchDispatchMode):
    """Context in which an operation that needs the values of meta tensors raises `PhaseError`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`; raise `PhaseError` if it needs values."""
        kwargs = kwargs or {}
        if func in _COPIES or func is _aten.equal.default or not _TAGS.isdisjoint(func.tags):
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if any(map(has_no_values, given)) and _needs_values(func, args, kwargs):
                raise reads_values("planned", func)
        return func(*args, **kwargs)


def _needs_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func is _aten._to_copy.default:
        device = kwargs.get("device")
        return args[0].is_meta and device is not None and torch.device(device).type != "meta"
    if func in _COPIES:
        return args[1].is_meta and not args[0].is_meta
    if func is _aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return not func._can_decompose()  # a composite op is checked at its parts
