"""Small whole numbers that a forward computes from sizes alone keep their values beside the shapes.

So a model may decide by them: those of Hugging Face look whether positions, `torch.arange(t)`, are
of one sequence or of several that were packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from fzero.virtual import unseen

_MOST = 2**20  # elements
_KNOWN = "known_values"
_READS = (
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__float__,
    Tensor.item,
    Tensor.tolist,
    torch.equal,
)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch: on tensors without values, and on the values that are known."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func in _READS and all(_is_known(x) for x in given):
        return func(*_values((args, kwargs))[0], **_values((args, kwargs))[1])
    out = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        for x in given[:1]:  # it was written to
            vars(x).pop(_KNOWN, None)
        return out
    made = func in _device_constructors() and not given
    if _is_small(out) and (made or (given and all(_is_known(x) for x in given))):
        with unseen():
            arguments, keywords = _values((args, kwargs))
            vars(out)[_KNOWN] = func(*arguments, **keywords)
    return out


def _is_small(x: Any) -> bool:
    """Whether it is worth to keep: whole numbers of the model, and not many."""
    return type(x) is Tensor and x.is_meta and not x.is_floating_point() and x.numel() <= _MOST


def _is_known(x: Tensor) -> bool:
    return _KNOWN in vars(x) or (not x.is_meta and type(x) is Tensor)


def _values(tree: Any) -> Any:
    """The same arguments with the values that are known."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return vars(x).get(_KNOWN, x)
        on_meta = (isinstance(x, torch.device) and x.type == "meta") or x == "meta"
        return "cpu" if on_meta else x

    return tree_map(of, tree)
