"""Replicas that train apart are recorded: made again with their bits, and compared within each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero.errors import MismatchError


def step_of(stage: int, mesh: Any) -> Any:
    @fzero.local(every=4)
    def step_fn(state: Any, x: torch.Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x - 1).square().mean(), state)(x)
        return fzero.apply_gradients(state), loss

    return fzero.simulate(fzero.shard(step_fn, stage=stage, mesh=mesh), world_size=4)


def flip(flat: torch.Tensor) -> None:
    flat.view(torch.int32)[0] ^= 1 << 20


@pytest.mark.parametrize(("stage", "mesh"), [(0, None), (2, (2, 2)), (3, (2, 2))])
def test_replicas_that_train_apart_are_made_again(stage: int, mesh: Any) -> None:
    step = fzero.record(step_of(stage, mesh), every=3, keep=None)
    state = step.init({"w": torch.ones(3)}, fzero.optim.adamw(0.1))
    g = torch.Generator().manual_seed(0)
    for number in range(10):
        if number == 5:
            flip(state.optimizer.moments[0][0][2])
        state, _ = step(state, torch.rand(4, 8, 3, generator=g))
    parting = fzero.bisect(step.recording)
    assert parting is not None
    assert (parting.update, parting.ranks, parting.leaves) == (5, (2,), ("exp_avg w",))
    assert fzero.replay(step.recording, step=4).same
    assert fzero.replay(step.recording, step=5).same is False
    assert fzero.replay(step.recording, step=10).same  # from a state after the flip


def test_the_ranks_of_a_replica_are_compared() -> None:
    step = fzero.record(step_of(1, (2, 2)), every=3)
    state = step.init({"w": torch.ones(3)}, fzero.optim.adamw(0.1))
    with pytest.raises(MismatchError, match=r"ranks \[2, 3\] have .* show rank 3 wrong first"):
        for number in range(4):
            if number == 3:
                flip(state.params.flats[0][3])
            state, _ = step(state, torch.rand(4, 8, 3))
