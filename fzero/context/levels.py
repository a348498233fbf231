"""At which levels a tensor is differentiated: by autograd, and by the transforms of torch.func."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_level,
)
from torch._functorch import pyfunctorch
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.autograd import forward_ad

from fzero.context.here import in_forward_mode

_TORCH: Any = torch  # what wraps tensors has no types
BASE, _TANGENT, _FIRST = 1, 2, 2
"""The bits of ordinary autograd and of its forward mode; how many come before torch.func's."""


def _levels() -> list[Any]:
    """What torch.func is doing around this call, the innermost transform last."""
    if maybe_current_level() is None:
        return []
    return pyfunctorch.retrieve_all_functorch_interpreters()


def nesting() -> str:
    """Return which transforms of torch.func are around this call, the innermost last."""
    names = [
        f"vmap of {level.batch_size()}" if level.key() == TransformType.Vmap else level.key().name
        for level in _levels()
    ]
    return ", ".join(names)


def followed(x: Tensor) -> int:
    """Return, bit by bit, the levels at which `x` is differentiated or mapped over."""
    levels, parts, mode = _levels(), dict[int, Tensor](), torch.is_grad_enabled()
    while is_functorch_wrapped_tensor(x):
        parts[maybe_get_level(x)] = x
        x = get_unwrapped(x)
    bits = 0
    for i, level in reversed([*enumerate(levels)]):
        part, key = parts.get(level.level()), level.key()
        if part is not None and _is_followed(part, level, mode=mode):
            bits |= 1 << _FIRST + i
        mode = mode and (key != TransformType.Grad or level.prev_grad_mode())
    bits |= BASE * (mode and x.requires_grad)
    if in_forward_mode():
        with _lowered(None):
            bits |= _TANGENT * _has_tangent(x)
    return bits


def _is_followed(x: Tensor, level: Any, *, mode: bool) -> bool:
    if level.key() == TransformType.Jvp:
        with _lowered(level):
            return _has_tangent(x)
    return (mode and x.requires_grad) if level.key() == TransformType.Grad else True


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x, level=0).tangent is not None


def reverse(bits: int) -> bool:
    """Whether one of these levels has a graph, by which a backward comes."""
    grads = (i for i, one in enumerate(_levels()) if one.key() == TransformType.Grad)
    return bool(bits & BASE) or any(bits >> _FIRST + i & 1 for i in grads)


def beyond_reach(bits: int, known: Mapping[int, Tensor]) -> bool:
    """Whether one of these levels is a backward of the user's by torch.func, see `tokens`.

    It comes to what is behind its inputs alone: to no token that is made here.
    """
    grads = ((i, one) for i, one in enumerate(_levels()) if one.key() == TransformType.Grad)
    return any(bits >> _FIRST + i & 1 and one.level() not in known for i, one in grads)


def by_func(bits: int) -> bool:
    """Whether one of these levels is of torch.func."""
    return bool(bits >> _FIRST)


def tokens(bits: int, known: Mapping[int, Tensor]) -> list[Tensor]:
    """Return tensors without elements that are followed at these levels.

    known: by level those that are there already; 0 is autograd's own.
    """
    found = [known.get(0, _new(None))] if bits & BASE else []
    found += [_new("tangent")] if bits & _TANGENT else []
    for i, level in enumerate(_levels()):
        if bits >> _FIRST + i & 1:
            one = known.get(level.level())
            found.append(_new(level) if one is None else one)
    return found


def _new(level: Any) -> Tensor:
    with _lowered(level):
        if level == "tangent":
            return forward_ad.make_dual(torch.zeros(0), torch.zeros(0))
        if level is None:
            return torch.zeros(0, requires_grad=True)
        if level.key() == TransformType.Jvp:
            return forward_ad.make_dual(torch.zeros(0), torch.zeros(0))
        if level.key() == TransformType.Vmap:
            zeros = torch.zeros(level.batch_size(), 0)
            return _TORCH._C._functorch._add_batch_dim(zeros, 0, level.level())
        with enable_inplace_requires_grad(True):
            return torch.zeros(0).requires_grad_()


@contextmanager
def _lowered(level: Any) -> Generator[None]:
    """Be at a level of torch.func, or outside of all of them, in this block."""
    down_to = 0 if level is None or level == "tangent" else level.level()
    with ExitStack() as stack:
        for one in reversed(_levels()):
            if one.level() > down_to:
                stack.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
        yield


def at_level(x: Tensor, level: int) -> Tensor:
    """Return what `x` is at a level: without the wrappers of those inside of it."""
    while is_functorch_wrapped_tensor(x) and not 0 <= maybe_get_level(x) <= level:
        x = get_unwrapped(x)
    return x
