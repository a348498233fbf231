"""Behaviour 38 on real ranks: second order in the loss and around it, equal to unsharded."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.state import Buffers, TrainState
from tests.behaviours.networks import (
    PLACES,
    Tensors,
    hvp,
    mean_gradient,
    per_rank,
    regression,
    total,
)
from tests.behaviours.test_second_order import INSIDE, LOSS, PARAMS, V, whole
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.xdist_group("gloo"),
    # torch itself uses torch.jit.script when forward mode is first used in a process.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


def inside_everywhere(rank: int, world_size: int) -> dict[Any, Tensors]:
    """The gradient of each loss at each place."""
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    x, y = (t[rank] for t in regression(world_size, 4, 3, 2))
    found = {}
    for stage, reshard in PLACES:
        for name, (loss, _) in INSIDE.items():
            state = fzero.init(
                PARAMS, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard
            )
            state, _ = fzero.grad_and_reduce(loss, state)(x, y)
            found[stage, reshard, name] = fzero.gradients(state)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_38_inside_the_loss(ranks: int) -> None:
    batches = per_rank(*regression(ranks, 4, 3, 2))
    want = {name: mean_gradient(known, PARAMS, batches) for name, (_, known) in INSIDE.items()}
    for found in run_ranks(inside_everywhere, ranks):
        for (*place, name), got in found.items():
            message = f"{name} at {place}"
            torch.testing.assert_close(got, want[name], rtol=1e-9, atol=1e-12, msg=message)


def around_everywhere(rank: int, world_size: int) -> dict[Any, Tensors]:
    """A Hessian-vector product and a meta-gradient, with the transform around fzero's step."""
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    x, y = (t[rank] for t in regression(world_size, 4, 3, 2))
    found = {}

    def init(params: Any, stage: int, reshard: Any) -> TrainState:
        options: Any = {"stage": stage, "reshard_after_forward": reshard}
        return fzero.init(params, fzero.optim.sgd(0.1), **options)

    def passed(flats: Any, x: Tensor, y: Tensor, state: TrainState) -> TrainState:
        params = Buffers(flats=tuple(flats), placement=state.params.placement)
        return fzero.grad_and_reduce(LOSS, state.replace(params=params))(x, y)[0]

    def gradient(flats: Any, state: TrainState) -> Any:
        return fzero.gradients(passed(flats, x, y, state))

    def outer(flats: Any, state: TrainState) -> Tensor:
        new = fzero.apply_gradients(passed(flats, x[:2], y[:2], state))
        return LOSS(fzero.full_params(new), x[2:], y[2:]) / world_size

    for place in PLACES:
        state, v = init(PARAMS, *place), init(V, *place)
        along = partial(gradient, state=state)
        flats = state.params.flats
        found[*place, "hvp"] = torch.func.jvp(along, (flats,), (v.params.flats,))[1]
        rows = torch.func.grad(outer)(flats, state)
        found[*place, "maml"] = whole(state, Buffers(flats=rows, placement=state.params.placement))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_38_around_the_step(ranks: int) -> None:
    batches = per_rank(*regression(ranks, 4, 3, 2))

    def mean_loss(params: Any, part: slice = slice(None)) -> Tensor:
        return total(LOSS(params, x[part], y[part]) for x, y in batches) / ranks

    def maml(params: Any) -> Tensor:
        g = torch.func.grad(mean_loss)(params, slice(0, 2))
        return mean_loss({k: p - 0.1 * g[k] for k, p in params.items()}, slice(2, 4))

    want = {"hvp": hvp(mean_loss, PARAMS, V), "maml": torch.func.grad(maml)(PARAMS)}
    for found in run_ranks(around_everywhere, ranks):
        for (*place, name), got in found.items():
            message = f"{name} at {place}"
            torch.testing.assert_close(got, want[name], rtol=1e-9, atol=1e-12, msg=message)
