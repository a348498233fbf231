"""Which of torch's modes is active: they decide between the fast path and the general one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_bdim,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.context.here import in_forward_mode, is_abstract
from fzero.errors import FzeroError, LayoutError, PhaseError

P = ParamSpec("P")
R = TypeVar("R")
LEFT: dict[int, Callable[[Any], None]] = {}
"""Of each tensor that a record has left in the program: what judges the outcome of a step."""


def in_transform() -> bool:
    """Whether a torch.func transform (or forward-mode AD) surrounds this call."""
    return maybe_current_level() is not None or in_forward_mode()


def for_training(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `do(...)`; in inference mode, with tensors that training can use afterwards."""
    if not torch.is_inference_mode_enabled():
        return do(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return do(*args, **kwargs)


@contextmanager
def explains_inference(arguments: Any) -> Iterator[None]:
    """Raise `LayoutError` where autograd fails in this block by an argument of inference mode."""
    try:
        yield
    except RuntimeError as error:
        made = [x for x in optree.tree_leaves(arguments) if isinstance(x, Tensor)]
        bad = next((x for x in made if x.is_inference()), None)
        if bad is None or isinstance(error, FzeroError):
            raise
        first = str(error).partition("\n")[0]
        raise LayoutError(
            f"an argument of {bad.dtype}, shape {[*bad.shape]}, was made under inference_mode; "
            f"torch says: {first:.200}",
            cause="a batch, or features of another model, computed under torch.inference_mode(): "
            "autograd cannot save it for a backward.",
            fix="compute it under torch.no_grad(), or pass x.clone().",
        ) from error


def require_autograd(name: str) -> None:
    """Raise `PhaseError` in inference mode, where every gradient would be a silent zero."""
    if torch.is_inference_mode_enabled():
        raise PhaseError(
            f"{name} inside torch.inference_mode().",
            cause="an evaluation's context around a training step; autograd records nothing.",
            fix="leave it, or use torch.no_grad(), inside which grad_and_reduce works.",
        )


def holds(condition: Tensor) -> bool:
    """Whether a condition is true; under vmap, whether it is for all that is mapped over."""
    while is_functorch_wrapped_tensor(condition):
        condition = get_unwrapped(condition)
    with _DisableFuncTorch():
        return bool(condition.all())


def samples(x: Tensor) -> list[Tensor]:
    """Return the values of x inside of transforms: of each sample that vmap maps over."""
    if not is_functorch_wrapped_tensor(x):
        return [x]
    inner = get_unwrapped(x)
    parts = inner.unbind(maybe_get_bdim(x)) if is_batchedtensor(x) else [inner]
    return [sample for part in parts for sample in samples(part)]


def is_differentiated(x: Tensor) -> bool:
    """Whether a gradient by `x` is wanted, by autograd or by any level of torch.func."""
    while True:
        if torch.is_grad_enabled() and x.requires_grad:
            return True
        if not is_functorch_wrapped_tensor(x):
            return False
        x = get_unwrapped(x)


def without_transforms(name: str, x: Tensor) -> Tensor:
    """Return the values of x inside of transforms. Raises `PhaseError` if vmap maps over it."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            raise PhaseError(
                f"{name} under torch.func.vmap.",
                cause="each sample has values of its own, and the host needs one for all of them.",
                fix="compute it outside of vmap, and map over the other arguments: in_dims.",
            )
        x = get_unwrapped(x)
    return x


def is_recorded(tensors: Iterable[Any]) -> bool:
    """Whether this call is being traced (make_fx, fake tensors).

    On an abstract rank fake tensors are what real ones are elsewhere.
    """
    fake = (isinstance(t, FakeTensor) for t in tensors)
    return get_proxy_mode() is not None or (not is_abstract() and any(fake))


def needs_func(tensors: Iterable[Any]) -> bool:
    """Whether gradients are made by torch.func: under a transform, or recorded on one real rank.

    What is recorded on an abstract rank is what runs on real ones.
    """
    return in_transform() or (is_recorded(tensors) and not is_abstract())


def wants_graph(tensors: Iterable[Any]) -> bool:
    """Whether the caller differentiates by one of these with ordinary autograd."""
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tensors
    )
