"""A small step, and what a state holds: for tests that hold two states together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fzero

PARAMS = {"w": torch.ones(5), "b": torch.ones(2)}
RANKS = 2
X = torch.tensor([1.0, 3.0])


def loss(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum() + (params["b"] ** 2).sum()


def good_step(state: Any, x: Tensor) -> tuple[Any, Tensor]:
    state, value = fzero.grad_and_reduce(loss, state)(x)
    return fzero.apply_gradients(state), value


def contents(state: Any) -> list[Tensor]:
    """Copies of every tensor that a stacked state holds."""
    held = (state.params.flats, state.gradients.flats, state.optimizer.moments)
    return [t.clone() for flats in held for t in flatten(flats)] + [state.step.clone()]


def flatten(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [t for part in tree for t in flatten(part)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
