"""Under autocast every stage computes what one process computes, in both drivers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
from tests.autocast.mixed import (
    DRIVERS,
    LOW,
    LR,
    STAGES,
    WORLDS,
    Mixed,
    by_engine,
    by_function,
    by_one_process,
    data,
    mean_gradients,
    on_ranks,
)
from tests.ranks import run_ranks


def on_gloo(rank: int, world_size: int, stage: int) -> list[dict[str, Tensor]]:
    return [by_engine(rank, stage, 3), by_function(rank, stage, 3)]


def test_the_gradients_of_the_oracle_are_none_of_them_zero() -> None:
    for world_size in WORLDS:
        found = mean_gradients(Mixed(), world_size, 0)
        used = {path for path, gradient in found.items() if gradient.any()}
        assert used == set(found) - {"unused.weight", "unused.bias"}


@DRIVERS
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_is_that_of_one_process_under_autocast(
    driver: Any, stage: int, world_size: int
) -> None:
    found = on_ranks(driver, world_size, stage, 1)
    wanted = by_one_process(world_size, 1)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert torch.equal(found[path], value), path


@pytest.mark.parametrize("world_size", WORLDS)
def test_later_steps_which_round_are_the_same_at_every_stage_in_both_drivers(
    world_size: int,
) -> None:
    first, *others = [
        on_ranks(driver, world_size, stage, 3)
        for driver in (by_engine, by_function)
        for stage in STAGES
    ]
    for found in others:
        assert all(torch.equal(found[path], value) for path, value in first.items())
    for path, value in by_one_process(world_size, 3).items():
        assert torch.allclose(first[path], value, rtol=0.05, atol=0.5), path


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gloo_ranks_give_the_same_bits(stage: int) -> None:
    wanted = on_ranks(by_engine, 2, 0, 3)
    for answers in run_ranks(on_gloo, 2, stage):
        for found in answers:
            assert all(torch.equal(found[path], value) for path, value in wanted.items())


@DRIVERS
def test_the_global_norm_is_that_of_one_process_at_every_stage(driver: Any) -> None:
    gradients = mean_gradients(Mixed(), 3, 0).values()
    wanted = torch.cat([gradient.flatten() for gradient in gradients]).norm()

    def norm(rank: int, stage: int) -> dict[str, Tensor]:
        if driver is by_engine:
            engine = Engine(Mixed(), torch.optim.SGD, stage=stage, autocast=LOW)
            engine(data(rank, 0)).backward()
            found = engine.global_grad_norm
            assert found is not None
            return {"norm": found}
        apply, params = fzero.functionalize(Mixed())
        state = fzero.init(params, fzero.optim.sgd(LR), stage=stage, autocast=LOW)

        @fzero.autocast
        def step(state: Any) -> Any:
            return fzero.grad_and_reduce(lambda p: apply(p, data(rank, 0)), state)()

        return {"norm": fzero.global_norm(step(state)[0])}

    for stage in STAGES:
        assert torch.allclose(on_ranks(norm, 3, stage)["norm"], wanted, rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_windows_accumulation_and_kept_units_change_nothing(stage: int) -> None:
    apply, params = fzero.functionalize(Mixed())

    def step_fn(state: Any, xs: Tensor) -> Any:
        for x in xs.unbind():
            state, _ = fzero.grad_and_reduce(lambda p, x=x: apply(p, x), state)()
        return fzero.apply_gradients(state), None

    def run(rank: int, reshard: Any, wraps: Callable[[Any], Any]) -> dict[str, Tensor]:
        step: Any = fzero.shard(wraps(step_fn), stage=stage, reshard_after_forward=reshard)
        state = step.init(params, fzero.optim.sgd(LR))
        xs = torch.stack([data(rank, 0), data(rank, 1)])
        return fzero.full_params(step(state, xs)[0])

    plain = on_ranks(run, 2, True, fzero.autocast)
    kept = on_ranks(run, 2, "window", lambda fn: fzero.coalesce(fzero.autocast(fn)))
    other = on_ranks(run, 2, False, lambda fn: fzero.autocast(fzero.coalesce(fn)))
    for path, value in plain.items():
        assert torch.equal(kept[path], value), path
        assert torch.equal(other[path], value), path


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_per_sample_are_those_of_torch_autocast(stage: int) -> None:
    apply, params = fzero.functionalize(Mixed())
    xs = torch.stack([data(0, 0), data(1, 1)])

    def norms(rank: int) -> dict[str, Tensor]:
        @fzero.autocast
        def step(state: Any) -> Any:
            def of(x: Tensor) -> Tensor:
                new, _ = fzero.grad_and_reduce(lambda p: apply(p, x), state)()
                return fzero.full_gradients(new)["first.weight"]

            return state, torch.func.vmap(of)(xs)

        state = fzero.init(params, fzero.optim.sgd(LR), stage=stage, autocast=LOW)
        return {"gradients": step(state)[1]}

    def alone(weight: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=LOW):
            return apply({**params, "first.weight": weight}, x)

    wanted = torch.func.vmap(torch.func.grad(alone), (None, 0))(params["first.weight"], xs)
    assert torch.equal(on_ranks(norms, 2)["gradients"], wanted)
