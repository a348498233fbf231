"""The usual step: one gradient of a loss, and one update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fzero


def descends(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The step of `loss(params, *batch)`; its aux is the loss."""

    def step_fn(state: Any, *batch: Any) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(*batch)
        return fzero.apply_gradients(state), value

    return step_fn
