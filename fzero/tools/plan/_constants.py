"""Small tensors that a forward computes from sizes alone keep their values beside their shapes.

So a model may decide by them: those of Hugging Face look whether positions, `torch.arange(t)`, are
of one sequence or of several that were packed; `nn.TransformerEncoder` whether a mask is causal.
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
"""How the names of functions begin whose results are other ones each time."""

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
    """Call a function of torch: on tensors without values, and on the values that are known."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    known = all(map(is_known, given))
    if func in _READS and known:
        return func(*_values((args, kwargs))[0], **_values((args, kwargs))[1])
    out = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    writes = bool(given) and (out is given[0] or name == "__setitem__")
    target = given[0] if writes else out
    known = known and (bool(given) or func in _device_constructors())
    if known and _is_small(target) and not name.startswith(_RANDOM):
        with unseen():
            arguments, keywords = _values((args, kwargs))
            found = func(*arguments, **keywords)
        vars(target)[_KNOWN] = arguments[0] if found is None else found
    elif writes:
        vars(target).pop(_KNOWN, None)
    return out


def remember(made: Tensor, x: Tensor) -> None:
    """Note the values of a small tensor, that are read, with the one in its place."""
    if _is_small(made) and not x.is_meta and type(x) is Tensor and not x.requires_grad:
        vars(made)[_KNOWN] = x.detach().cpu().clone()


def _is_small(x: Any) -> bool:
    """Whether it is worth to keep: of the model, and not many numbers."""
    return type(x) is Tensor and x.is_meta and x.numel() <= _MOST


def is_known(x: Tensor) -> bool:
    """Whether the values of a tensor are there, or known."""
    return _KNOWN in vars(x) or (not x.is_meta and type(x) is Tensor)


def _values(tree: Any) -> Any:
    """The same arguments with the values that are known."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return vars(x).get(_KNOWN, x)
        on_meta = (isinstance(x, torch.device) and x.type == "meta") or x == "meta"
        return "cpu" if on_meta else x

    return tree_map(of, tree)
