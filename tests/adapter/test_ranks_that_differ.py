"""Ranks that make another number of backwards: an error on every rank, or served."""

from __future__ import annotations

import pytest
import torch

from fzero.adapter import Engine
from fzero.errors import MismatchError
from tests.adapter.nets import Net
from tests.ranks import run_ranks
from tests.strategies import integers

pytestmark = pytest.mark.xdist_group("gloo")


def backward(engine: Engine, at: int) -> None:
    engine(integers((2, 3), seed=at)).square().sum().backward()


def one_more_on_rank_1(rank: int, world_size: int, stage: int) -> None:
    engine, alone = (
        Engine(net, torch.optim.SGD(net.parameters(), lr=0.25), stage=stage)
        for net in (Net(), Net())
    )
    alone.module.load_state_dict(engine.full_state_dict())
    with pytest.raises(MismatchError, match=r"(?s)step\(\) of engine.*forward or backward"):
        for at in range(1 + rank):
            backward(engine, at)
        engine.step()
    engine.zero_grad()
    for one in (engine, alone):
        for at in range(3):
            backward(one, at)
            one.step()
    for path, value in engine.full_parameters().items():
        assert torch.equal(value, alone.full_parameter(path))


@pytest.mark.parametrize("stage", range(3))
def test_below_stage_3_another_number_of_backwards_raises_on_every_rank_and_all_go_on(
    stage: int,
) -> None:
    run_ranks(one_more_on_rank_1, 2, stage)


def served(rank: int, world_size: int) -> None:
    net = Net()
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.25), stage=3)
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


def test_at_stage_3_a_rank_with_more_backwards_is_served() -> None:
    run_ranks(served, 2)
