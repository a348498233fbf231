"""A model for autocast, its oracle in one process, and a training by each driver.

Weights and data are small integers, so that products and sums in bfloat16 are exact, and numbers
can be compared by bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fzero
from tests import drivers, oracle

LOW = torch.bfloat16
LR = 0.5
STAGES = range(4)
WORLDS = [1, 2, 3, 4]


class Projection(nn.Linear):
    """A class of a user's own, below a safe one."""


class Mixed(nn.Module):
    """Safe and other modules, tied, frozen and unused parameters, and one of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.table = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.table.weight
        self.last = Projection(6, 3)
        self.unused = nn.Linear(2, 3)
        self.gain = nn.Parameter(torch.ones(6))
        for number, p in enumerate(self.parameters()):
            signs = torch.arange(p.numel()).square().add(number).remainder(7).remainder(3).sub(1)
            p.data.copy_(signs.reshape(p.shape))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.gain
        h = self.frozen(h) + self.table(torch.tensor([1, 3]))
        return self.last(h).sum() + self.head(h).sum()


SAFE = {"first.weight", "first.bias", "frozen.weight", "last.weight", "last.bias"}
SAFE |= {"unused.weight", "unused.bias"}


def data(rank: int, number: int) -> Tensor:
    """[2, 4] of the numbers -1, 0 and 1."""
    return (torch.arange(8.0) * (rank + 2) + number).remainder(3).sub(1).reshape(2, 4)


def low_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=LOW):
        return functional_call(Mixed(), params, (x,))


def mean_gradients(module: nn.Module, world_size: int, number: int) -> dict[str, Tensor]:
    """(1/W) sum_r g_r under torch's own autocast; zeros where there is none."""
    batches = [data(rank, number) for rank in range(world_size)]
    found = oracle.mean_gradient(low_loss, dict(module.named_parameters()), batches)
    return {path: gradient for path, gradient in found.items() if gradient is not None}


def by_one_process(world_size: int, steps: int) -> dict[str, Tensor]:
    batches = [[data(rank, number) for rank in range(world_size)] for number in range(steps)]
    return oracle.train(low_loss, dict(Mixed().named_parameters()), batches, sgd)


def sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, LR)


def by_engine(rank: int, stage: int, steps: int, **options: Any) -> dict[str, Tensor]:
    batches = [data(rank, number) for number in range(steps)]
    engine = drivers.by_engine(Mixed(), batches, sgd, stage=stage, autocast=LOW, **options)
    return engine.full_parameters()


def by_function(rank: int, stage: int, steps: int, **options: Any) -> dict[str, Tensor]:
    batches = [data(rank, number) for number in range(steps)]
    options |= {"stage": stage, "wrap": fzero.autocast}
    return fzero.full_params(drivers.by_steps(Mixed(), batches, fzero.optim.sgd(LR), **options))


def on_ranks(body: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> Any:
    """Run `body(rank, ...)` on virtual ranks; what rank 0 returns."""
    stacked = drivers.each_rank(lambda rank: body(rank, *args, **kwargs), world_size)
    return {path: value[0] for path, value in stacked.items()}


DRIVERS = pytest.mark.parametrize("driver", [by_engine, by_function])
