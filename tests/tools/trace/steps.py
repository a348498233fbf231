"""A model and its step, to be traced and to be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fzero


def model(device: str) -> nn.Module:
    """Uneven sizes, a tied weight, a frozen one and a scalar."""
    with torch.device(device):
        made = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 7))
        made[2].weight = made[3].weight
        made[0].bias.requires_grad_(False)
        made.register_parameter("scalar", nn.Parameter(torch.ones(())))
    return made


def step_of(apply: Any, options: dict[str, Any]) -> Any:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        for _ in range(2):
            state, loss = fzero.grad_and_reduce(lambda p, x: apply(p, x).pow(2).mean(), state)(x)
        return fzero.apply_gradients(state), fzero.pmean(loss)

    coalesces, clips = options.pop("coalesces"), options.pop("clips")
    step_fn = fzero.coalesce(step_fn) if coalesces else step_fn
    step_fn = fzero.clip(step_fn, max_norm=1.0) if clips else step_fn
    return fzero.shard(step_fn, **options)


class Of(nn.Module):
    """A module around a function of its one weight and the batch."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.fn, self.w = fn, nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.w, x)
