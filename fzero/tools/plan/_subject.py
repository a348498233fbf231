"""The model on the meta device, and the training step that a plan runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from fzero.errors import LayoutError
from fzero.options import OPTIONS
from fzero.state import NAMESPACE
from fzero.state.codec import Compress
from fzero.state.offload import Offload
from fzero.state.precision import Autocast, as_autocast
from fzero.tools.plan import _constants as constants
from fzero.tools.plan._meta import AsOn
from fzero.tools.plan._watch import rename
from fzero.tools.trace.found import RecordMode
from fzero.transforms import (
    accumulate,
    apply_gradients,
    autocast,
    clip,
    coalesce,
    compress,
    grad_and_reduce,
    offload,
    shard,
)
from fzero.transforms.functionalize import functionalize, tracks
from fzero.transforms.states import flatten_states

Loss = Callable[[Any, Any], Tensor]
"""(model, batch) -> a scalar, as `fzero.certify` takes it. `model` is called like the module."""


Make = Callable[[Tensor], Tensor]
"""A tensor -> one of its shape and dtype, without values."""


class PlannedStep(NamedTuple):
    """A step, the parameters of its state, and its arguments, all tensors without values."""

    name: str
    step: Any
    params: Any
    args: tuple[Any, ...]


def planned_step_of(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    micro_batches: int,
    coalesced: bool,
    max_norm: float | None,
    lowered: Autocast | torch.dtype | None,
    away: Offload | None,
    encoded: Compress | None,
    options: Mapping[str, Any],
) -> PlannedStep:
    """Return the step of a training loop, forward, backward and update, with these options."""
    compute, make = loss or mean_output, maker(autocasts=lowered is not None)
    with nullcontext() if lowered else AsOn("cpu"):  # which keeps what is known of buffers
        apply, params = _functionalized(emptied(model, make))

    def loss_of(params: Any, batch: Any) -> Tensor:
        return compute(lambda *args, **kwargs: apply(params, *args, **kwargs), batch)

    def step_fn(state: Any, batch: Any) -> tuple[Any, Tensor]:
        state, value = grad_and_reduce(loss_of, state)(batch)
        for one in flatten_states("plan", state)[0]:
            rename("window", one.window)
            rename("gradients", one.gradients)
        return apply_gradients(state), value

    step: Any = accumulate(step_fn, micro_batches=micro_batches)
    if coalesced:
        step = coalesce(step)
    step = clip(step, max_norm=max_norm)
    if (low := as_autocast(lowered)) is not None:
        safe = low.lower_precision_safe_modules
        step = autocast(step, dtype=low.dtype, lower_precision_safe_modules=safe)
    if away is not None:
        step = offload(step, **away.homes, folder=away.folder)
    OPTIONS["compress"].require(encoded)
    if encoded is not None:
        kinds = {"gradients": encoded.gradients, "parameters": encoded.parameters}
        step = compress(step, **kinds, over=encoded.over)
    step = shard(step, **options)
    return PlannedStep(type(model).__name__, step, params, (tree_emptied(batch, make),))


def _functionalized(model: nn.Module) -> tuple[Callable[..., Any], Any]:
    """Return (apply, params) of a module; each call gets the running statistics as they are now."""
    if not any(tracks(part) and part.training for part in model.modules()):
        return functionalize(model)
    apply, params, buffers = functionalize(model, buffers=True)
    return lambda *args, **kwargs: apply(*args, buffers=buffers, **kwargs)[0], params


def mean_output(model: Callable[..., Any], batch: Any) -> Tensor:
    """The default loss: `.loss` of the model's output, or the mean of the output.

    A dict is passed by name, a tuple or list by position.
    """
    if isinstance(batch, dict):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(found, Tensor):
        return found
    leaves = (x for x in _leaves(out) if isinstance(x, Tensor))
    first = next((x for x in leaves if x.is_floating_point()), None)
    if first is None:
        raise LayoutError(
            f"the model returned a {type(out).__name__} without a floating tensor.",
            cause="an output that needs a loss of its own.",
            fix="give loss=lambda model, batch: ..., which returns a scalar.",
        )
    return first.mean()


class _Emptying(TorchFunctionMode):
    """Context in which copies of tensors have no values; those of small buffers are kept aside."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            x, memo = args
            if id(x) not in memo:
                memo[id(x)] = self._make(x)
                constants.remember(memo[id(x)], x)
            return memo[id(x)]
        return func(*args, **(kwargs or {}))


def emptied(model: nn.Module, make: Make) -> nn.Module:
    """Return a copy of a module whose tensors have no values, without allocating its size."""
    memo: dict[int, Any] = {id(p): _parameter(p, make) for p in model.parameters()}
    with _Emptying(make):
        return copy.deepcopy(model, memo)


def tree_emptied(tree: Any, make: Make) -> Any:
    """Replace the tensors of a pytree by tensors without values; ties are kept."""
    memo: dict[int, Tensor] = {}

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) not in memo:
            memo[id(x)] = _parameter(x, make)
        return memo[id(x)] if isinstance(x, Tensor) else x

    return optree.tree_map(moved, tree, namespace=NAMESPACE)


def _parameter(x: Tensor, make: Make) -> Tensor:
    """Return `x` without values: a parameter if it is one, with its notes."""
    made = make(x.detach())
    if isinstance(x, nn.Parameter):
        made = nn.Parameter(made, requires_grad=x.requires_grad)
    else:
        made.requires_grad_(x.requires_grad)
    vars(made).update(vars(x))  # which modules own it, as `functionalize` notes it
    return made


def maker(*, autocasts: bool) -> Make:
    """Return a converter to tensors without values: on the meta device, where ops are fastest.

    Autocast has no effect there, so with `autocasts` they are fake CPU tensors, which are slower.
    """
    if not autocasts:
        return lambda x: torch.empty_like(x, device="meta")
    mode = RecordMode("plan")
    here = torch.device("cpu")
    return lambda x: FakeTensor(mode, torch.empty_like(x, device="meta"), here)


def device_of(tree: Any) -> str:
    """Return the device type of the parameters; "cuda" for those on the meta device."""
    leaves = tree.parameters() if isinstance(tree, nn.Module) else _leaves(tree)
    kinds = {x.device.type for x in leaves if isinstance(x, Tensor)} - {"meta"}
    return kinds.pop() if len(kinds) == 1 else "cuda"


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace=NAMESPACE)
