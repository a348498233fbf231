"""Where autocast begins and ends, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Autocast, Engine
from fzero.errors import LayoutError, MismatchError
from tests.autocast.mixed import (
    LOW,
    LR,
    Mixed,
    data,
    on_ranks,
)


def test_fp32_is_the_identity() -> None:
    def run(rank: int, wraps: Callable[[Any], Any]) -> dict[str, Tensor]:
        apply, params = fzero.functionalize(Mixed())

        def step_fn(state: Any) -> Any:
            state, _ = fzero.grad_and_reduce(lambda p: apply(p, data(rank, 0) / 7), state)()
            return fzero.apply_gradients(state), None

        step: Any = fzero.shard(wraps(step_fn), stage=3)
        return fzero.full_params(step(step.init(params, fzero.optim.sgd(LR)))[0])

    wanted = on_ranks(run, 2, lambda fn: fn)
    found = on_ranks(run, 2, lambda fn: fzero.autocast(fn, dtype=torch.float32))
    assert all(torch.equal(found[path], value) for path, value in wanted.items())


@pytest.mark.parametrize("raises", [False, True])
def test_autocast_is_off_behind_the_forward_also_one_that_raised(raises: bool) -> None:
    seen: list[bool] = []

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            if raises:
                raise KeyError("in the middle")
            return self.map(x).float().sum()

    engine = Engine(Seeing(), torch.optim.SGD, stage=2, autocast=LOW)
    if raises:
        with pytest.raises(KeyError):
            engine.module(torch.ones(1, 2))
    else:
        engine.module(torch.ones(1, 2)).backward()
    assert seen == [True]
    assert not torch.is_autocast_enabled("cpu")
    engine.close()
    assert not engine.module._forward_hooks


def test_an_autocast_around_is_overridden_and_warned_of_once() -> None:
    engine = Engine(nn.Linear(2, 2), torch.optim.SGD, stage=0, autocast=LOW)
    with torch.autocast("cpu", dtype=torch.float16):
        with pytest.warns(UserWarning, match=r"torch.autocast\(torch.float16\) is around a step"):
            assert engine(torch.ones(1, 2)).dtype is LOW
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert engine(torch.ones(1, 2)).dtype is LOW
    apply, params = fzero.functionalize(nn.Linear(2, 2))
    dtypes = []

    @fzero.autocast
    def step(state: Any) -> Any:
        def loss_fn(p: Any) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                dtypes.append(apply(p, torch.ones(1, 2)).dtype)
            dtypes.append(apply(p, torch.ones(1, 2)).dtype)
            return apply(p, torch.ones(1, 2)).float().sum()

        return fzero.grad_and_reduce(loss_fn, state)()

    state = fzero.init(params, fzero.optim.sgd(LR), stage=0)
    with torch.autocast("cpu", dtype=torch.float16):
        with pytest.warns(UserWarning, match="that one holds"):
            step(state)
        step(state)
    assert dtypes == [torch.float32, LOW] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, r"dtype=torch.float64"),
        ({"dtype": "bf16"}, r"dtype='bf16'"),
        ({"lower_precision_safe_modules": nn.Linear}, "lower_precision_safe_modules="),
        ({"lower_precision_safe_modules": [nn.Linear(1, 1)]}, "lower_precision_safe_modules="),
        ({"lower_precision_safe_modules": [Tensor]}, "lower_precision_safe_modules="),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        fzero.autocast(lambda state: (state, None), **options)
    with pytest.raises(LayoutError, match=message):
        Autocast(**options)


def test_a_model_in_16_bits_is_refused() -> None:
    half = nn.Linear(2, 2).to(LOW)
    with pytest.raises(LayoutError, match=r"weight is torch.bfloat16, and autocast wants fp32"):
        Engine(half, torch.optim.SGD, stage=2, autocast=LOW)
    _, params = fzero.functionalize(half)
    step: Any = fzero.autocast(lambda state: (state, None))
    with pytest.raises(LayoutError, match="wants fp32"):
        fzero.shard(step, stage=2).init(params, fzero.optim.sgd(LR))
    with pytest.raises(LayoutError, match="wants fp32"):
        step(fzero.init(params, fzero.optim.sgd(LR), stage=2))


def test_frozen_parameters_in_16_bits_may_stand_beside_those_that_learn() -> None:
    """A base in bfloat16 that a small fp32 part is trained on top of."""
    base, part = nn.Linear(2, 2).to(LOW).requires_grad_(False), nn.Linear(2, 1)
    module, before = nn.Sequential(base, part), base.weight.clone()
    optimizer = torch.optim.SGD(part.parameters(), LR)
    engine = Engine(module, optimizer, stage=2, autocast=LOW)
    engine(torch.ones(1, 2)).float().sum().backward()
    engine.step()
    found = engine.full_parameters()
    assert torch.equal(found["0.weight"], before) and found["1.weight"].dtype is torch.float32
    apply, params = fzero.functionalize(module)

    @fzero.autocast
    def step(state: Any) -> Any:
        return fzero.grad_and_reduce(lambda p: apply(p, torch.ones(1, 2)).float().sum(), state)()

    step(fzero.init(params, fzero.optim.sgd(LR), stage=2, autocast=LOW))


@pytest.mark.parametrize("name", ["shard", "simulate", "autocast"])
def test_it_goes_inside_of_shard(name: str) -> None:
    options = {"shard": {"stage": 2}, "simulate": {"world_size": 2}, "autocast": {}}[name]
    inner = getattr(fzero, name)(lambda state: (state, None), **options)
    with pytest.raises(LayoutError, match=f"autocast was put around {name}"):
        fzero.autocast(inner)


def test_ranks_that_compute_in_other_dtypes_are_told() -> None:
    def body(rank: int) -> dict[str, Tensor]:
        state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(LR), stage=2)

        def step(state: Any) -> Any:
            return fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()

        with pytest.raises(MismatchError, match="autocast torch"):
            (fzero.autocast(step) if rank else step)(state)
        return {}

    on_ranks(body, 2)
