"""Which optimizers of torch.optim can step shards: said before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fzero.errors import LayoutError, PhaseError

CLOSURE = "it evaluates the loss several times in a step, by a closure"
REFUSED = {
    torch.optim.LBFGS: CLOSURE,
    torch.optim.SparseAdam: "it takes sparse gradients; flat buffers have dense ones",
}


def require_usable(source: Any) -> None:
    """Raise `LayoutError` for what is no torch.optim class, instance or factory."""
    if isinstance(source, Optimizer):
        require_pure_class(type(source))
    elif isinstance(source, type) and issubclass(source, Optimizer):
        require_pure_class(source)
    elif not callable(source) or isinstance(source, type):
        raise not_an_optimizer(f"{source!r}")


def require_pure_class(kind: type[Optimizer]) -> None:
    """Raise `LayoutError` for a class that is no function of parameters, gradients and state."""
    for refused, reason in REFUSED.items():
        if issubclass(kind, refused):
            raise LayoutError(
                f"{kind.__name__} cannot step shards of the parameters: {reason}.",
                cause="an optimizer that is no function of parameters and gradients.",
                fix="use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...).",
            )
    if hasattr(kind, "eval"):
        raise LayoutError(
            f"{kind.__name__} has eval(), which changes the parameters by the optimizer's state.",
            cause="an optimizer without a schedule (schedule-free): it trains at one point and is "
            "to be evaluated at another; the state that leads there is sharded.",
            fix="use an optimizer whose parameters are what is to be evaluated; for an average of "
            "them, keep one beside the training (examples/ema.py).",
        )


def has_steps(instance: Optimizer) -> bool:
    """Whether an instance has state of a run: it made steps, or a state_dict was loaded into it."""
    return any(state.get("step", 1) != 0 for state in instance.state.values() if state)


def not_an_optimizer(seen: str) -> LayoutError:
    """Return the error for what is none of torch.optim."""
    return LayoutError(
        f"the optimizer is {seen}.",
        cause="an fzero.optim rule, a scheduler, or the name of an optimizer.",
        fix="pass a torch.optim optimizer, its class, or params -> optimizer: "
        "functools.partial(torch.optim.AdamW, lr=3e-4).",
    )


def name_of(factory: Any) -> str:
    """Return what a class, factory or instance is called, alike on every rank: no address."""
    if isinstance(factory, Optimizer):
        return type(factory).__name__
    function = getattr(factory, "func", factory)
    return getattr(function, "__qualname__", type(function).__name__)


def cannot_be_cut(instance: Optimizer, name: str) -> LayoutError:
    """Return the error for state that does not go with the elements."""
    return LayoutError(
        f"{type(instance).__name__} keeps {name} for a parameter, which is neither shaped as the "
        "parameter nor a count of updates.",
        cause="state that does not go with the elements: it cannot be cut into shards.",
        fix="use an optimizer that keeps tensors shaped as the parameters, and numbers.",
    )


def not_alike(
    instance: Optimizer, group: int, name: str, values: Mapping[tuple[int, ...], float]
) -> LayoutError:
    """Return the error for a counter that is another one for other parameters of a group."""
    seen = ", and ".join(f"{value} for one of shape {shape}" for shape, value in values.items())
    return LayoutError(
        f"{type(instance).__name__} keeps another {name} for other parameters of param group "
        f"{group}: {seen}.",
        cause="a rule that treats matrices in one way and the rest in another, in one param "
        "group, and notes which (timm's Muon).",
        fix="make param groups of their own, params=[{'params': matrices}, {'params': others}]: "
        "such a number is kept once for each group.",
    )


def not_differentiable(rule: object, reason: str) -> PhaseError:
    """Return the error for an update that can be neither differentiated nor recorded as a graph."""
    return PhaseError(
        f"an update by {rule!r} was to be differentiated or traced.",
        cause="torch.func around apply_gradients, parameters or gradients with a graph, or "
        f"fzero.trace, compile or prove of the step; {reason}.",
        fix="use fzero.optim.sgd, adam, adamw or lion, which can be.",
    )
