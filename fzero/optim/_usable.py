"""Which optimizers of torch.optim can step shards: said before anything is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fzero.errors import LayoutError

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
