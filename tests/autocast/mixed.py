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

import fzero
from fzero.adapter import Engine

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


def mean_gradients(module: nn.Module, world_size: int, number: int) -> dict[str, Tensor]:
    """(1/W) sum_r g_r under torch's own autocast; zeros where there is none."""
    learning = {path: p for path, p in module.named_parameters() if p.requires_grad}
    total = {path: torch.zeros_like(p) for path, p in learning.items()}
    for rank in range(world_size):
        with torch.autocast("cpu", dtype=LOW):
            loss = module(data(rank, number))
        grads = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
        for path, gradient in zip(learning, grads, strict=True):
            total[path] += 0 if gradient is None else gradient
    return {path: gradient / world_size for path, gradient in total.items()}


def by_one_process(world_size: int, steps: int) -> dict[str, Tensor]:
    module = Mixed()
    for number in range(steps):
        for path, gradient in mean_gradients(module, world_size, number).items():
            module.get_parameter(path).data -= LR * gradient
    return {path: p.detach() for path, p in module.named_parameters()}


def by_engine(rank: int, stage: int, steps: int, **options: Any) -> dict[str, Tensor]:
    module = Mixed()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)
    engine = Engine(module, optimizer, stage=stage, autocast=LOW, **options)
    for number in range(steps):
        engine(data(rank, number)).backward()
        engine.step()
    return engine.full_parameters()


def by_function(rank: int, stage: int, steps: int, **options: Any) -> dict[str, Tensor]:
    apply, params = fzero.functionalize(Mixed())

    @fzero.autocast
    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: apply(p, x), state)()
        return fzero.apply_gradients(state), loss

    step: Any = fzero.shard(step_fn, stage=stage, donate=True, **options)
    state = step.init(params, fzero.optim.sgd(LR))
    for number in range(steps):
        state, _ = step(state, data(rank, number))
    return fzero.full_params(state)


def on_ranks(body: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> Any:
    """Run `body(rank, ...)` on virtual ranks; what rank 0 returns."""

    def one(_: Tensor) -> Any:
        return body(fzero.axis_index(), *args, **kwargs)

    stacked = fzero.simulate(one, world_size=world_size)(torch.zeros(world_size))
    return {path: value[0] for path, value in stacked.items()}


DRIVERS = pytest.mark.parametrize("driver", [by_engine, by_function])
