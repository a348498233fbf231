"""Ranks that make another number of backwards are served by the others."""

from __future__ import annotations

import pytest
import torch

from fzero.adapter import Engine
from tests.adapter.nets import Net
from tests.ranks import run_ranks
from tests.strategies import integers

pytestmark = pytest.mark.xdist_group("gloo")


def backward(engine: Engine, at: int) -> None:
    engine(integers((2, 3), seed=at)).square().sum().backward()


def served(rank: int, world_size: int, stage: int) -> None:
    net = Net()
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.25), stage=stage)
    alone = Net()
    alone.load_state_dict(engine.full_state_dict())
    for first in (0, 10):
        for at in range(first, first + 1 + rank):
            backward(engine, at)
        engine.step()
        losses = [alone(integers((2, 3), seed=at)).square().sum() for at in (first, first + 1)]
        (losses[0] + losses[1] / 2).backward()  # batch `first` is on both ranks, the next on one
        with torch.no_grad():
            for p in alone.parameters():
                assert p.grad is not None
                p -= 0.25 * p.grad
                p.grad = None
    for path, value in engine.full_parameters().items():
        torch.testing.assert_close(value, alone.get_parameter(path).detach())


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_with_more_backwards_is_served(stage: int) -> None:
    run_ranks(served, 2, stage)
