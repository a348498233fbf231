"""Constant propagation on meta tensors: small tensors that depend only on sizes keep their values.

A model may then branch on them: Hugging Face's models test whether positions, `torch.arange(t)`,
are of one sequence or of several packed ones; `nn.TransformerEncoder` whether a mask is causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from fzero.context.here import unseen

_MOST = 2**22  # elements: a mask of 2048 tokens
_KNOWN = "known_values"
_RANDOM = ("rand", "empty", "new_empty", "bernoulli", "dropout", "normal", "uniform")
"""Prefixes of the names of functions whose results are not a function of their arguments."""

_READS = (
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__float__,
    Tensor.item,
    Tensor.tolist,
    torch.equal,
)


def call_abstractly(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch on meta tensors, and on their known values if all are known."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    known = all(map(is_known, tensors))
    # Also what writes numbers that are known into a tensor with values, as a counter is.
    if known and (func in _READS or (func is Tensor.copy_ and not tensors[0].is_meta)):
        return func(*_values((args, kwargs))[0], **_values((args, kwargs))[1])
    out = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    writes = bool(tensors) and (out is tensors[0] or name == "__setitem__")
    target = tensors[0] if writes else out
    known = known and (bool(tensors) or func in _device_constructors())
    if known and _is_small(target) and not name.startswith(_RANDOM):
        with unseen():
            arguments, keywords = _values((args, kwargs))
            value = func(*arguments, **keywords)
            vars(target)[_KNOWN] = arguments[0] if value is None else value
    elif writes:
        vars(target).pop(_KNOWN, None)
    return out


def remember(made: Tensor, x: Tensor) -> None:
    """Attach the values of a small tensor `x` to `made`, the meta tensor that replaces it."""
    if _is_small(made) and not x.is_meta and type(x) is Tensor and not x.requires_grad:
        vars(made)[_KNOWN] = x.detach().cpu().clone()


def _is_small(x: Any) -> bool:
    """Return whether values are kept for `x`: a plain meta tensor with few elements."""
    return type(x) is Tensor and x.is_meta and x.numel() <= _MOST


def is_known(x: Tensor) -> bool:
    """Return whether a tensor has values, or known ones are attached to it."""
    return _KNOWN in vars(x) or (not x.is_meta and type(x) is Tensor)


def _values(tree: Any) -> Any:
    """Replace meta tensors in a pytree by their known values."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return vars(x).get(_KNOWN, x)
        on_meta = (isinstance(x, torch.device) and x.type == "meta") or x == "meta"
        return "cpu" if on_meta else x

    return tree_map(of, tree)
