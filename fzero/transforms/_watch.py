"""Finds what a function reads without being given it, where that would lose a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_level,
)
from torch.overrides import TorchFunctionMode

from fzero.errors import LayoutError

_SET_REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad"].__set__


class Watch(TorchFunctionMode):
    """Refuses tensors that are differentiated by and are no arguments: they would be constants."""

    def __init__(self, inputs: Iterable[Tensor], *, records: bool) -> None:
        super().__init__()
        self._inputs, self._records = {id(x): x for x in inputs}, records

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, then go on."""
        for x in (*args, *(kwargs or {}).values()):
            for part in x if isinstance(x, list | tuple) else (x,):
                if isinstance(part, Tensor):
                    self.refuse(part)
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, Tensor) and self._tracked(x):  # a view of an input, or made here
                self._inputs[id(x)] = x
        if func == _SET_REQUIRES_GRAD:  # a wrapper that is made anew for each call
            self._inputs[id(args[0])] = args[0]
        return out

    def _tracked(self, x: Tensor) -> bool:
        if is_functorch_wrapped_tensor(x):  # of a transform that this call is already below
            return maybe_get_level(x) > (maybe_current_level() or 0)
        return self._records and x.requires_grad

    def refuse(self, x: Tensor) -> None:
        """Raise, if x is differentiated by, and neither an argument nor a view of one."""
        if id(x) not in self._inputs and self._tracked(x):
            raise LayoutError(
                f"remat: the function reads a tensor of {x.dtype}, shape {[*x.shape]}, that "
                "requires grad and was not given to it.",
                cause="a closure, a global or an attribute; its gradient would silently be "
                "missing.",
                fix="pass it as an argument, e.g. fzero.remat(layer)(params, x); for a module, "
                "fzero.remat(module)(x).",
            )
