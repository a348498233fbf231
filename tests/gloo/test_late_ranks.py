"""A rank that comes late to its backward does not hold up those that compute already."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

LAYERS, WIDTH = 4, 8
BYTES = 4 * WIDTH * WIDTH  # of a bucket: one layer
PATIENCE = timedelta(seconds=20)

Hook = Callable[[Tensor], None]


class Net(nn.Module):
    """LAYERS linear maps. `early` ends the forward, `late` sees the gradient of the first map."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.get_parameter("weight"), 1 + number % 2)

    def forward(self, x: Tensor, early: Hook, late: Hook) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if not number:
                x.register_hook(late)
        early(x)
        return x.sum()


def hooks(rank: int, key: str) -> tuple[Hook, Hook]:
    """Rank 1 ends its forward when rank 0 is nearly through with its backward."""
    store = dist.distributed_c10d._get_default_store()

    def early(x: Tensor) -> None:
        if rank == 1:
            store.wait([key], PATIENCE)  # raises if it does not come

    def late(gradient: Tensor) -> None:
        if rank == 0:
            store.set(key, "here")

    return early, late


def nothing(x: Tensor) -> None:
    """What the unsharded oracle does in their places."""


def backward(rank: int, world_size: int, engine: bool) -> dict[str, Tensor]:
    module, x = Net(), torch.full((1, WIDTH), 1.0 + rank)
    marks = hooks(rank, f"late {engine}")
    if engine:
        made = Engine(module, torch.optim.SGD, stage=0, bucket_bytes=BYTES)
        made(x, *marks).backward()
        return made.full_gradients()
    apply, params = fzero.functionalize(module)
    state = fzero.init(params, fzero.optim.sgd(1.0), stage=0, bucket_bytes=BYTES)
    state, _ = fzero.grad_and_reduce(lambda p: apply(p, x, *marks), state)()
    return fzero.gradients(state)


@pytest.mark.parametrize("engine", [True, False], ids=["engine", "functional"])
def test_a_rank_computes_its_backward_while_another_has_not_begun(engine: bool) -> None:
    module = Net()
    total: Any = (
        sum(module(torch.full((1, WIDTH), 1.0 + rank), nothing, nothing) for rank in range(2)) / 2
    )
    total.backward()
    for found in run_ranks(backward, 2, engine):
        for path, p in module.named_parameters():
            assert p.grad is not None and torch.equal(found[path], p.grad), path
