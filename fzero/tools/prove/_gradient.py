"""The mark on what autograd makes for a reduction: an op of the recorded graph, and no change."""

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


def marked(step: Callable[..., Any], states: int) -> Callable[..., Any]:
    """Return the step with a mark on each gradient of each of so many states."""
    return observe(step, [_mark] * states)


def _mark(what: str, state: Any, value: Any) -> Any:
    return gradient(value[1]) if what == "gradient" else None
