"""What a type checker sees of a transformed step: the arguments and the result of the step itself.

`make lint` checks this file: each `assert_type` is a claim about types, and each ignored error
is one that the checker must report, else the ignore itself is an error.
"""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import fzero
from fzero.transforms._pipeline import Step


def step_fn(state: fzero.TrainState, x: Tensor, *, scale: float) -> tuple[fzero.TrainState, Tensor]:
    state, loss = fzero.grad_and_reduce(lambda p: scale * (p * x).mean(), state)()
    return fzero.apply_gradients(state), loss


@fzero.coalesce
def bare(state: fzero.TrainState, x: Tensor) -> tuple[fzero.TrainState, int]:
    return state, len(x)


@fzero.accumulate(steps=2)
@fzero.clip(max_norm=1.0)
@fzero.coalesce()
def decorated(state: fzero.TrainState, x: Tensor) -> tuple[fzero.TrainState, int]:
    return state, len(x)


def new_state() -> fzero.TrainState:
    return fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=0)


def test_the_result_has_the_type_of_the_step() -> None:
    state, x = new_state(), torch.ones(4, 2)
    pipeline = fzero.clip(fzero.accumulate(fzero.coalesce(step_fn), steps=2), max_norm=1.0)
    new, loss = pipeline(state, x, scale=2.0)
    assert_type(new, fzero.TrainState)
    assert_type(loss, Tensor)
    assert_type(bare(state, x), tuple[fzero.TrainState, int])
    assert_type(decorated(state, x), tuple[fzero.TrainState, int])
    assert isinstance(pipeline, Step) and isinstance(decorated, Step)
    assert (new.step.item(), bare(state, x)[1], decorated(state, x)[1]) == (1, 4, 4)


def test_simulate_keeps_the_type_of_any_function() -> None:
    def centered(x: Tensor) -> Tensor:
        return x - fzero.pmean(x)

    xs = torch.tensor([1.0, 2.0, 6.0])
    for step in (fzero.simulate(centered, world_size=3), fzero.simulate(world_size=3)(centered)):
        found = step(xs)
        assert_type(found, Tensor)
        assert found.tolist() == [-2.0, -1.0, 3.0]


def wrong_calls(state: fzero.TrainState, x: Tensor) -> None:
    """Never run: what the checker must refuse."""
    step = fzero.clip(fzero.coalesce(step_fn), max_norm=None)
    step(state, x)  # pyright: ignore[reportCallIssue]
    step(state, "x", scale=1.0)  # pyright: ignore[reportArgumentType]
    step(state, x, scale=1.0, size=2)  # pyright: ignore[reportCallIssue]
    decorated(x, state)  # pyright: ignore[reportArgumentType]
    fzero.clip(step_fn)  # pyright: ignore[reportCallIssue]
    fzero.accumulate(step_fn, steps="2")  # pyright: ignore[reportArgumentType]
    fzero.coalesce(state)  # pyright: ignore[reportArgumentType]
