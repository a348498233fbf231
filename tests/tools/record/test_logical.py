"""A run with logical ranks is made again, bit for bit, on any number of ranks at any stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError

LOGICAL = 4
PLACES = [(4, 3), (3, 2), (2, 0), (1, 3)]


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Dropout(0.3), nn.Tanh(), nn.Linear(11, 3))


def rows_of_a_rank(number: int, count: int) -> Tensor:
    """Those of the first `count` of the logical ranks."""
    return torch.randn(4 * LOGICAL, 6, generator=torch.Generator().manual_seed(number))[: 4 * count]


def recorded_on(ranks: int, by: float = 0.0) -> fzero.tools.Recording:
    """A run of three updates; `by` for each rank is added to its loss, a fault."""
    apply, params = fzero.functionalize(model())

    def step_fn(state: Any, x: Tensor) -> Any:
        real = len(fzero.logical_ranks())

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            return apply(params, x).sin().square().mean() * (1 + by * real)

        state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), loss

    train_step = fzero.shard(step_fn, stage=2, logical_ranks=LOGICAL, seed=3)
    step = fzero.record(fzero.simulate(train_step, world_size=ranks), every=2, keep=None)
    state = step.init(params, fzero.optim.adamw(1e-2))
    for number in range(3):
        x = rows_of_a_rank(number, LOGICAL)
        state, _ = step(state, x.view(ranks, -1, 6))
    return step.recording


@pytest.mark.parametrize("recorded", [1, 2, 4])
def test_the_bits_are_those_of_the_run_at_other_places(recorded: int) -> None:
    recording = recorded_on(recorded)
    for ranks, stage in PLACES:
        again = fzero.replay(recording, step=3, world_size=ranks, stage=stage)
        assert again.same is True, (ranks, stage, again.parted)


def test_a_step_that_looks_at_its_number_of_logical_ranks_is_told() -> None:
    recording = recorded_on(2, by=1e-6)
    assert fzero.replay(recording, step=1, world_size=2, stage=3).same
    again = fzero.replay(recording, step=1, world_size=1)
    assert again.same is False and again.parted


def test_parts_that_are_not_equal_are_refused() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        sizes = [(1, 3, 4)[logical] for logical in fzero.logical_ranks()]

        def loss_fn(p: Any, x: Tensor) -> Tensor:
            return (p["w"] * x).mean()

        state, loss = fzero.grad_and_reduce(loss_fn, state, sizes=sizes)(x)
        return fzero.apply_gradients(state), loss

    step = fzero.record(fzero.shard(step_fn, stage=2, logical_ranks=3), every=2)
    state = step.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1))
    step(state, torch.randn(8, 4))
    with pytest.raises(LayoutError, match="8 rows is not equal parts of 3 logical ranks"):
        fzero.replay(step.recording, step=1, world_size=2)


def engine_of(stage: int) -> Engine:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return Engine(module, optimizer, stage=stage, logical_ranks=LOGICAL, seed=3)


def train_step(engine: Engine, x: Tensor) -> None:
    for part in engine.parts(x):
        engine.backward(engine(part).sin().square().mean())
    engine.step()


def test_an_engine_too() -> None:
    engine, step = engine_of(2), fzero.record(train_step, every=2)
    for number in range(3):
        step(engine, rows_of_a_rank(number, LOGICAL))
    for ranks, stage in PLACES:
        made = lambda stage=stage: engine_of(stage)  # noqa: E731
        again = fzero.replay(step.recording, step=2, world_size=ranks, engine=made)
        assert again.same is True, (ranks, stage, again.parted)
