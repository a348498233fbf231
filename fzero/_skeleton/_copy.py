"""Private copies of a module, made outside of every transform of the calling thread."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError, explain

_T = TypeVar("_T")
_CONTAINERS = (list, dict, set, deque)
_TORCHS = frozenset(vars(nn.Module()))  # its own tables: parameters, submodules, hooks


def copy_of(module: nn.Module, *, stateful: bool) -> nn.Module:
    """Copy a module; its parameters (if `stateful`, its buffers too) become placeholders."""
    try:
        twin = in_new_thread(_deepcopy, module, stateful)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise _copy_error(module, str(error)) from error
    pairs = [*zip(twin.modules(), module.modules(), strict=False)]
    if any(ours is theirs or type(ours) is not type(theirs) for ours, theirs in pairs):
        raise _copy_error(module, "its `__deepcopy__` returns, or shares, the original")
    return twin


def _deepcopy(module: nn.Module, stateful: bool) -> nn.Module:
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses results of autograd
    for value in module.parameters():
        memo[id(value)] = nn.Parameter(_placeholder(value), requires_grad=value.requires_grad)
    for value in module.buffers():
        memo[id(value)] = _placeholder(value) if stateful else value.detach().clone()
    twin = copy.deepcopy(module, memo)
    settle(module)
    return twin


def settle(module: nn.Module) -> None:
    """Wait for the GPU: another thread works on another stream, and this one reads or writes."""
    for device in {value.device for value in module.buffers() if value.is_cuda}:
        torch.cuda.synchronize(device)


def in_new_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Run `function` outside of every torch.func level, tracer and inference mode of this thread.

    Constants that were made inside of one could not be used after it ends.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function, *args).result()


def _placeholder(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _copy_error(module: nn.Module, why: str) -> LayoutError:
    return LayoutError(
        explain(
            f"{type(module).__name__} cannot be copied: {why}.",
            cause="an attribute that holds a lock, an open file, a process group or a graph.",
            fix="keep it outside of the module, or define `__deepcopy__` on the class that has it.",
        )
    )


def containers_of(module: nn.Module) -> tuple[str, ...]:
    """The attributes of a module's own that its forward may append to."""
    mine = vars(module).items()
    return tuple(k for k, v in mine if k not in _TORCHS and type(v) in _CONTAINERS)


def fresh(value: Any) -> Any:
    """Copy a container, and those in it; whatever else it holds is the same object."""
    if type(value) is dict:
        return {key: fresh(x) for key, x in value.items()}
    return type(value)(map(fresh, value)) if type(value) in _CONTAINERS else value
