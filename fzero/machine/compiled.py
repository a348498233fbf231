"""Placeholders under torch.compile: a gather is one op of the compiled graph.

    token -> fzero::whole -> values

A token is a number in a tensor. It is what a graph is given for each placeholder, so that nothing
is gathered while a graph is traced or its guards are checked. Where a kernel reads the placeholder,
in the forward and in the backward, the graph has the op, which gathers when it runs. That way every
backend (inductor as well) works on ordinary tensors.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from fzero.errors import CallError, LayoutError

T = TypeVar("T")

DISABLED_FRAMES = 2
"""Frames of torch's between a caller and a function that is `torch._disable_dynamo`."""

MADE_FRAMES = DISABLED_FRAMES + 1
"""The same for a function of `without_dynamo`."""

_numbers = itertools.count()
_reads: weakref.WeakValueDictionary[int, CompiledRead] = weakref.WeakValueDictionary()


def without_dynamo(fn: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls `fn` as it is under torch.compile, too.

    For functions that are made in each call: `torch._disable_dynamo` ties what it wraps into a
    cycle, which keeps all that it closes over, states with their gradients, until the garbage
    collector comes by.

    Example:
        >>> without_dynamo(lambda x: x + 1)(1)
        2
    """
    made = _Made(_run, fn)
    functools.update_wrapper(made, fn)
    return made


class _Made(functools.partial[Any]):
    """What is made in a call, and is called in its turn."""

    def __iter__(self) -> NoReturn:
        """Raise `CallError`: `state, loss = grad_and_reduce(loss_fn, state)` lacks the call."""
        name = getattr(self, "__name__", "it")
        raise CallError(
            f"{name} is a function, and was unpacked like a result.",
            cause="state, loss = fzero.grad_and_reduce(loss_fn, state), without the call.",
            fix="call it on the batch: state, loss = fzero.grad_and_reduce(loss_fn, state)(batch).",
        )


@torch._disable_dynamo
def _run(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    return fn(*args, **kwargs)


class CompiledRead:
    """Reads the values of one placeholder for a compiled graph; lives as long as that."""

    __slots__ = ("__weakref__", "token", "values")

    def __init__(self, values: Callable[[], Tensor]) -> None:
        number = next(_numbers)
        self.values, self.token = values, torch.tensor(number)
        _reads[number] = self


@torch.library.custom_op("fzero::whole", mutates_args=())
def whole(
    token: Tensor, number: int, shape: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a copy of the values of a token: a graph may reuse the memory of what its ops return.

    number: counts the reads in a graph. Two of them are then never one common subexpression, whose
    values would stay from the forward to the backward: each of the two gathers its own.
    """
    return _reads[int(token)].values().detach().clone(memory_format=torch.contiguous_format)


@whole.register_fake
def _(
    token: Tensor, number: int, shape: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class Traced:
    """The gatherer of a placeholder that torch.compile traces: a read is an op of the graph."""

    changes: int = 0

    def __init__(self, token: Tensor, meta: Tensor, device: torch.device) -> None:
        self.token, self._meta, self._device = token, meta, device
        self._reads = itertools.count()

    def leaf(self, group: int, position: int) -> Tensor:
        """Return what the op gives."""
        shape, dtype = list(self._meta.shape), self._meta.dtype
        return whole(self.token, next(self._reads), shape, dtype, self._device)

    def device_of(self, group: int) -> torch.device:
        """Return where the values will be."""
        return self._device

    def leaves_of(self, group: int) -> Any:
        """Nobody asks for them while a graph is traced."""
        return ()

    def begin_write(self, placeholder: Any, func: Any) -> NoReturn:
        """Refuse: the graph would write to a copy."""
        raise LayoutError(
            f"a parameter of stage 3 is written in place inside a compiled function ({func}): "
            f"{placeholder!r}; this rank holds a shard of it.",
            cause="an in-place method (add_, copy_, ...) or an initializer inside torch.compile.",
            fix="in a loss, clone it first: losses are pure. To change a parameter of a "
            "module, use `with fzero.adapter.gathered(module, modify=True)`, outside of what "
            "is compiled.",
        )

    def end_write(self, placeholder: Any, values: Tensor) -> None:
        """Never called: see `begin_write`."""
