"""A collective of the user's in a stage 3 loss, where ranks have read other units before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

PARAMS = {name: torch.full((n,), float(n)) for name, n in (("a", 3), ("b", 4), ("c", 5))}


def loss(params: Any, x: Tensor) -> Tensor:
    """Rank 1 reads all units before the sum over ranks, the others one before and one behind it."""
    odd = fzero.axis_index() == 1
    value = (params["a"] ** 2).sum() * x
    if odd:
        value = value + (params["b"] ** 2).sum() * x + params["c"].sum()
    total = fzero.psum(value)
    if not odd:
        value = value + params["c"].sum() * x
    return value + total / 2


def three_steps(rank: int, world_size: int, stage: int, window: bool) -> list[Any]:
    """What every rank holds after each of three updates; in the first one ranks ask each other."""

    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), None

    sharded = fzero.shard(fzero.coalesce(step) if window else step, stage=stage)
    state = sharded.init(PARAMS, fzero.optim.sgd(2.0**-10))
    found = []
    for _ in range(3):
        state, _ = sharded(state, torch.tensor(float(rank + 1)))
        found.append(fzero.full_params(state))
    return found


@pytest.mark.sparse
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_come_to_it_together_whatever_they_have_read(ranks: int, window: bool) -> None:
    """The numbers are those of stage 0, which gathers nothing; and no rank waits for ever."""
    want = run_ranks(three_steps, ranks, 0, window, timeout_s=30)
    got = run_ranks(three_steps, ranks, 3, window, timeout_s=30)
    for mine, right in zip(got, want, strict=True):
        for after, expected in zip(mine, right, strict=True):
            assert all(torch.equal(after[name], expected[name]) for name in PARAMS)
