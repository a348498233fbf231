"""A collective of the user's in a stage 3 loss, where ranks have read other units before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
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


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_come_to_it_together_whatever_they_have_read(ranks: int, window: bool) -> None:
    """The numbers are those of stage 0, which gathers nothing; and no rank waits for ever."""
    want = run_ranks(three_steps, ranks, 0, window, timeout_s=30)
    got = run_ranks(three_steps, ranks, 3, window, timeout_s=30)
    for mine, right in zip(got, want, strict=True):
        for after, expected in zip(mine, right, strict=True):
            assert all(torch.equal(after[name], expected[name]) for name in PARAMS)


MANY = {f"p{i}": torch.full((3,), float(i + 1)) for i in range(12)}
"""A bucket each."""


def early_or_late(params: Any, x: Tensor, *, late: bool) -> Tensor:
    """Where it is `late` the gradients of `MANY` come behind the collective's backward."""
    before = sum((p**2).sum() for p in params.values()) if late else torch.zeros(())
    total = fzero.psum(params["p0"].sum() * x)
    after = torch.zeros(()) if late else sum((p**2).sum() for p in params.values())
    # What is made last is differentiated first.
    return (before + after) * x + total


def is_late(ranks: str) -> bool:
    return {"one late": fzero.axis_index() == 1, "one early": fzero.axis_index() != 1}[ranks]


def by_states(rank: int, world_size: int, stage: int, ranks: str) -> list[Any]:
    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        late = is_late(ranks)
        grad = fzero.grad_and_reduce(lambda p, x: early_or_late(p, x, late=late), state)
        state, _ = grad(x)
        return fzero.apply_gradients(state), None

    sharded = fzero.shard(step, stage=stage)
    state = sharded.init(MANY, fzero.optim.sgd(2.0**-10), bucket_bytes=12)
    found = []
    for _ in range(2):
        state, _ = sharded(state, torch.tensor(float(rank + 1)))
        found.append(fzero.full_params(state))
    return found


class Many(torch.nn.Module):
    """`MANY` as a module."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in MANY.items():
            setattr(self, name, torch.nn.Parameter(value.clone()))

    def forward(self, x: Tensor, late: bool) -> Tensor:
        return early_or_late(dict(self.named_parameters()), x, late=late)


def by_engine(rank: int, world_size: int, stage: int, ranks: str) -> list[Any]:
    model = Many()
    engine = Engine(model, fzero.optim.sgd(2.0**-10), stage=stage, bucket_bytes=12)
    found = []
    for _ in range(2):
        engine.backward(model(torch.tensor(float(rank + 1)), is_late(ranks)))
        engine.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("ranks", ["one late", "one early"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("driver", [by_states, by_engine])
@pytest.mark.parametrize("stage", [1, 2])
def test_no_rank_waits_for_gradients_behind_a_collectives_backward(
    stage: int, driver: Any, size: int, ranks: str
) -> None:
    want = run_ranks(by_states, size, 0, ranks, timeout_s=30)
    got = run_ranks(driver, size, stage, ranks, timeout_s=30)
    for mine, right in zip(got, want, strict=True):
        for after, expected in zip(mine, right, strict=True):
            assert all(torch.equal(after[name], expected[name]) for name in MANY)
