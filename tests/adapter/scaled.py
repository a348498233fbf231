"""What the tests of a loss scale train."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

INF = float("inf")


class Net(nn.Module):
    """A scalar, an empty, a frozen, a frozen and unused, and a tied parameter.

    What learns is used: an engine leaves alone what is not, and a functional step steps zeros.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 3, bias=False, dtype=dtype)
        self.c, self.unused = nn.Linear(5, 3, bias=False, dtype=dtype), nn.Linear(2, 2, dtype=dtype)
        self.c.weight = self.b.weight
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.ones(0, 3, dtype=dtype))
        self.a.bias.requires_grad_(False)
        self.unused.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.c(torch.tanh(self.a(self.b(torch.tanh(self.a(x))))))
        return self.gain * out + self.empty.sum()


def rows(rank: int, number: int, *, bad: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(2, 3, generator=source).to(dtype)
    return x.fill_(INF) if bad else x


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "not fused": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5, dampening=0.25),
}
