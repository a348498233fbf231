"""The run without an engine: one module, one optimizer, the mean over ranks of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.adapter.nets import linear
from tests.adapter.plain import Draw, Make

OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


class Odd(nn.Module):
    """Sizes that do not divide, a parameter that nothing uses, a frozen one between others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(3, 5), linear(5, 3)
        self.fixed = nn.Parameter(torch.full((3,), 0.5).double(), requires_grad=False)
        self.unused, self.c = linear(2, 1), linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) * self.fixed)


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(7)
    return make()


def loss_of(module: Any, rank: int, number: int) -> Tensor:
    """Of rank's own data in step `number`."""
    x = Draw(rank, number)(2, 3)
    return (module(x) - x).square().sum()


class Unsharded:
    """What every rank's engine together must be equal to."""

    def __init__(self, make: Make, optimizer_of: OptimizerOf, world_size: int) -> None:
        self.module, self.world_size = seeded(make), world_size
        self.optimizer = optimizer_of(self.module)
        self.begin = self.parameters()

    def gradients(self, number: int, loss: Callable[..., Tensor] = loss_of) -> dict[str, Tensor]:
        """Compute, leave in p.grad, and return mean_r(g_r): zero where there is none."""
        self.optimizer.zero_grad()
        for rank in range(self.world_size):
            (loss(self.module, rank, number) / self.world_size).backward()
        found = {}
        for path, p in self.module.named_parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                found[path] = p.grad
        return found

    def step(self, number: int) -> None:
        self.gradients(number)
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {path: p.detach().clone() for path, p in self.module.named_parameters()}


def same_update(
    label: str,
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
    begin: dict[str, Tensor],
    *,
    rtol: float = 1e-8,
) -> None:
    """Compare what was changed since `begin`, against the largest change of each parameter."""
    assert found.keys() == wanted.keys(), f"{label}: {sorted(found.keys() ^ wanted.keys())}"
    for path, value in wanted.items():
        change, mine = value - begin[path], found[path] - begin[path]
        worst = (mine - change).abs().max().item() if value.numel() else 0.0
        scale = change.abs().max().item() if value.numel() else 0.0
        assert worst <= rtol * scale + 1e-13, f"{label}: {path} is off by {worst} of {scale}"
