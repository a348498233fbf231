"""Marks in a recorded graph: on what autograd makes for a reduction, and where a call begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.transforms.observe import observe


@torch.library.custom_op("fzero_prove::gradient", mutates_args=())
def gradient(x: Tensor) -> Tensor:
    """x: what autograd has made for a leaf, as it is handed to the reduction."""
    return x.clone()


@gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


GRADIENT = torch.ops.fzero_prove.gradient.default


@torch.library.custom_op("fzero_prove::again", mutates_args=())
def again(x: Tensor) -> Tensor:
    """x: any tensor; what follows is the second of two calls in a row."""
    return x.clone()


@again.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


AGAIN = torch.ops.fzero_prove.again.default


def marked(step: Callable[..., Any], states: int, local: set[str]) -> Callable[..., Any]:
    """Return the step with a mark on each gradient of each of so many states.

    local: is told the names of the transforms that have changed a gradient before it crosses ranks.
    """

    def mark(what: str, state: Any, value: Any) -> Any:
        if what != "gradient":
            return None
        local.update(x.name for x in state.setup.policy.points if getattr(x, "local", None))
        return gradient(value[1])

    return observe(step, [mark] * states)
