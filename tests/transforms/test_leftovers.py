"""A step that never updates is warned of once; where calls are meant to add up, nothing is said."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.descends import descends

SAID = "added its own, and made no update"


def loss_fn(p: Any, x: Tensor) -> Tensor:
    return (p["w"] * x).sum()


def adds(state: Any, x: Tensor) -> Any:
    return fzero.grad_and_reduce(loss_fn, state)(x)


def updates(state: Any) -> Any:
    return fzero.apply_gradients(state), None


def begun(step: Any) -> Any:
    return step.init({"w": torch.ones(4)}, fzero.optim.sgd(0.5))


@pytest.mark.parametrize("wrap", [lambda fn: fn, fzero.coalesce, fzero.clip(max_norm=1e9)])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_without_an_update_is_warned_of_once(stage: int, wrap: Any) -> None:
    step = fzero.shard(wrap(adds), stage=stage)
    state, x = begun(step), torch.ones(4)
    state, _ = step(state, x)  # nothing was there before
    with pytest.warns(UserWarning, match=SAID):
        state, _ = step(state, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, x)
    assert torch.equal(fzero.gradients(state)["w"], 3 * x)


def test_virtual_ranks_say_it_once() -> None:
    step = fzero.simulate(fzero.shard(adds, stage=2), world_size=3)
    state, x = begun(step), torch.ones(3, 4)
    state, _ = step(state, x)
    with pytest.warns(UserWarning, match=SAID) as said:
        state, _ = step(state, x)
    assert len(said) == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_nothing_is_said_where_updates_are_made(stage: int) -> None:
    """Warnings are errors here."""
    x = torch.ones(4)
    one, other = fzero.shard(adds, stage=stage), fzero.shard(updates, stage=stage)
    state = begun(one)
    for _ in range(3):  # an update is made after each call, then after two of them
        state, _ = other(one(state, x)[0])
    for _ in range(2):
        state, _ = other(one(one(state, x)[0], x)[0])
    assert torch.equal(fzero.full_params(state)["w"], 1 - 0.5 * 7 * x)

    state = begun(one)
    for _ in range(3):  # several steps, each of which adds once
        state, _ = fzero.shard(adds, stage=stage)(state, x)
    assert torch.equal(fzero.gradients(state)["w"], 3 * x)

    step = fzero.shard(fzero.coalesce(descends(loss_fn)), stage=stage)
    state, _ = step(fzero.grad_and_reduce(loss_fn, begun(step))(x)[0], x)  # the step's update
    assert torch.equal(fzero.full_params(state)["w"], 1 - 0.5 * 2 * x)

    inner = fzero.shard(descends(loss_fn), stage=stage)  # which waits for the last micro-batch
    state, _ = fzero.accumulate(inner, micro_batches=2)(begun(inner), torch.ones(4, 1))
    assert int(state.step) == 1


def sometimes(state: Any, x: Tensor, last: bool) -> Any:
    state, loss = adds(state, x)
    return (updates(state)[0] if last else state), loss


class Trainer:
    """Its step is a method, and counts calls."""

    calls = 0

    def step(self, state: Any, x: Tensor, last: bool) -> Any:
        self.calls += 1
        state, loss = adds(state, x)
        return (self.update(state) if last else state), loss

    def update(self, state: Any) -> Any:
        return fzero.apply_gradients(state)

    def __call__(self, state: Any, x: Tensor, last: bool) -> Any:
        return self.step(state, x, last)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "fn",
    [
        sometimes,
        Trainer().step,
        Trainer(),
        functools.partial(sometimes),
        fzero.clip(sometimes, max_norm=1e9),
        lambda s, x, last: sometimes(s, x, last),
    ],
)
def test_a_step_that_updates_in_a_later_call_is_not_warned_of(fn: Any, ranks: int) -> None:
    """Warnings are errors here. Gradients add up over three calls, as they do in plain PyTorch."""
    step = fzero.simulate(fzero.shard(fn, stage=2), world_size=ranks)
    state, x = begun(step), torch.ones(ranks, 4)
    for call in range(1, 7):
        state, _ = step(state, x, call % 3 == 0)
    assert torch.equal(state.step, torch.full((ranks,), 2))
