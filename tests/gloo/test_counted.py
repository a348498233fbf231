"""What four processes count, over every axis of a mesh; a plan counts the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.adapter.on_ranks import on_ranks

pytestmark = pytest.mark.xdist_group("gloo")
MESH = {"data": 2, "seq": 2}
Loss = Callable[[Any, Tensor], Tensor]


def summed_over_one(p: Any, x: Tensor) -> Tensor:
    return fzero.psum((p["w"] * x).sum(), axis="seq") ** 2


def summed_over_both(p: Any, x: Tensor) -> Tensor:
    """Calls over two sets of ranks of one size, which all ranks have to take in one order."""
    seen = fzero.all_gather(p["w"] * x, axis="seq")
    return (seen**2).sum() + fzero.pmean((p["w"] * x).sum()) + fzero.psum(x.sum(), axis="data")


def step_of(loss: Loss, calls: int = 1) -> Any:
    def step_fn(state: Any, x: Tensor) -> Any:
        value = x
        for _ in range(calls):
            state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    return step_fn


@on_ranks(4)
@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("loss", [summed_over_one, summed_over_both])
def test_a_plan_has_the_rounds_of_processes(
    rank: int, world_size: int, loss: Loss, coalesced: bool
) -> None:
    params, x = {"w": torch.arange(6.0)}, torch.ones(6)
    for stage in (0, 1, 2, 3):
        step_fn = step_of(loss, calls=2)
        made = fzero.coalesce(step_fn) if coalesced else step_fn
        step = fzero.shard(made, stage=stage, mesh=MESH)
        plan = fzero.plan.of_step(step, params, fzero.optim.sgd(0.1), x, world=4, rank=rank)
        state, counted = step.init(params, fzero.optim.sgd(0.1)), dict[str, int]()
        for _ in range(2):
            with fzero.count_collectives() as log:
                state, _ = step(state, x * rank)
            counted = log.counts()
        assert {one.rank for one in log.events} == {rank}
        assert counted == plan.collectives, stage


@pytest.mark.smoke
@on_ranks(4)
def test_each_rank_counts_what_crosses_either_dim(rank: int, world_size: int) -> None:
    local = fzero.local(step_of(lambda p, x: (p["w"] * x).sum()), every=1)
    step = fzero.shard(local, stage=1, mesh=(2, 2))
    state = step.init({"w": torch.ones(6)}, fzero.optim.sgd(0.1))
    with fzero.count_collectives() as log:
        step(state, torch.ones(6))
    assert {one.rank for one in log.events} == {rank}
    assert log.counts(axis="replicate") == {"all_reduce": 1}
    assert log.counts(axis="shard")["reduce_scatter"] == 1
