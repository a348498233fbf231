"""`scale_loss`: what is read is without the scale, and what divides is what multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.state import DynamicScale
from tests.covering import covered
from tests.descends import descends
from tests.oracle import square_loss
from tests.strategies import integers, same, seeds, stages, worlds
from tests.transforms.steps import LR, mean_loss, sgd

INF, NAN = float("inf"), float("nan")
OPTIMIZERS: dict[str, Any] = {"sgd": sgd, "lion": lambda: fzero.optim.lion(LR)}


step_fn = descends(mean_loss)


@settings(max_examples=20)
@given(
    ranks=worlds,
    stage=stages,
    coalesced=st.booleans(),
    scale=st.sampled_from([2.0**30, 2.0**-30, "dynamic"]),
    seed=seeds,
)
def test_what_is_read_of_a_state_is_without_the_scale(
    ranks: int, stage: int, coalesced: bool, scale: Any, seed: int
) -> None:
    wide = torch.float32
    params = {"w": integers((7,), 1, wide), "s": integers((), 2, wide), "e": torch.ones(0)}

    def look(state: Any, x: Tensor) -> Any:
        found = []
        for _ in range(2):
            state, loss = fzero.grad_and_reduce(square_loss, state)(x)
            norm, grads = fzero.global_norm(state), fzero.gradients(state)
            found.append({"loss": loss, "norm": norm, "grads": grads})
        return fzero.apply_gradients(state), found

    xs = integers((ranks,), seed, torch.float32)

    def run(scale: Any) -> Any:
        fn = fzero.scale_loss(fzero.coalesce(look) if coalesced else look, scale)
        step = fzero.simulate(fzero.shard(fn, stage=stage), world_size=ranks)
        return step(step.init(params, sgd()), xs)[1]

    same(run(scale), run(1))


def test_a_norm_of_large_scaled_gradients_does_not_overflow() -> None:
    """At 2^100 their squares are beyond fp32; the clip must see the true norm."""

    @fzero.scale_loss(scale=2.0**100)
    @fzero.clip(max_norm=1.0)
    def step(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: (p * torch.tensor([3.0, 4.0])).sum(), state)()
        return fzero.apply_gradients(state), fzero.global_norm(state)

    state, norm = step(fzero.init(torch.zeros(2), fzero.optim.sgd(1.0), stage=0))
    assert norm.item() == 5.0
    torch.testing.assert_close(fzero.full_params(state), torch.tensor([-0.6, -0.8]))


def test_a_growth_step_divides_by_the_scale_that_its_gradients_had() -> None:
    seen: list[float] = []

    @fzero.scale_loss(scale=DynamicScale(init_scale=8.0, growth_interval=2))
    def step(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: 3 * p, state)()
        before = fzero.full_params(state)
        state = fzero.apply_gradients(state)
        seen.append((before - fzero.full_params(state)).item())
        return state, None

    state = fzero.init(torch.zeros(()), fzero.optim.sgd(1.0), stage=0)
    scales = []
    for _ in range(5):
        state, _ = step(state)
        assert state.scale is not None
        scales.append(state.scale.scale.item())
    assert scales == [8.0, 16.0, 16.0, 32.0, 32.0]
    assert seen == [3.0] * 5


@covered(of_tensor=[True, False], stage=[0, 2])
def test_an_external_scale_may_change_while_its_gradients_are_held(
    of_tensor: bool, stage: int
) -> None:
    own = torch.tensor(4.0)

    @fzero.scale_loss(scale=own if of_tensor else own.item)
    def step(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: p.sum(), state)()
        held = state.gradients.flats[0][0].item()
        own.mul_(8)
        state, _ = fzero.grad_and_reduce(lambda p: p.sum(), state)()
        return fzero.apply_gradients(state), held

    state = fzero.init(torch.zeros(3), fzero.optim.sgd(1.0), stage=stage)
    for number, scale in enumerate((4.0, 32.0)):
        state, held = step(state)
        assert held == scale
        same(fzero.full_params(state), torch.full((3,), -2.0 * (number + 1)))


@covered(scale=[0.0, INF, NAN], optimizer=["sgd", "lion"])
def test_an_external_scale_that_divides_by_nothing_skips(scale: float, optimizer: str) -> None:
    step = fzero.scale_loss(step_fn, torch.tensor(scale))
    state = fzero.init(torch.ones(3), OPTIMIZERS[optimizer](), stage=1)
    new, loss = step(state, torch.ones(1))
    same(new.params, state.params)
    assert new.scale is not None and new.scale.overflowed and int(new.step) == 0
    assert torch.isfinite(loss)


def test_ready_gradients_are_scaled_as_those_of_a_backward() -> None:
    @fzero.scale_loss(scale=8)
    def step(state: Any) -> Any:
        state = fzero.add_gradients(state, torch.tensor([1.0, 2.0]))
        state, _ = fzero.grad_and_reduce(lambda p: p.sum(), state)()
        return fzero.apply_gradients(state), fzero.gradients(state)

    state, grads = step(fzero.init(torch.zeros(2), fzero.optim.sgd(1.0), stage=1))
    same(grads, torch.tensor([2.0, 3.0]))
    same(fzero.full_params(state), torch.tensor([-2.0, -3.0]))


def test_ranks_that_scale_in_other_ways_are_told() -> None:
    def body(x: Tensor) -> Tensor:
        state = fzero.init(torch.ones(2), sgd(), stage=2)
        fzero.scale_loss(step_fn, 2.0 + fzero.axis_index())(state, x)
        return x

    with pytest.raises(fzero.AxisError, match="loss scale StaticScale"):
        fzero.simulate(body, world_size=2)(torch.ones(2, 1))
