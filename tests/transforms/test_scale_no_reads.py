"""A scaled step waits for no device: found_inf and grad_scale go to the fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.state import DynamicScale
from tests.covering import covered
from tests.descends import descends
from tests.gpu.reads import Device, HostReadError, on_device

STEPS = 6
BAD = 3  # this step overflows

FUSED: dict[str, Any] = {
    "adamw": lambda: fzero.optim.adamw(0.1),
    "sgd": lambda: fzero.optim.sgd(0.1, momentum=0.5),
    "torch adamw": lambda: fzero.optim.from_torch(partial(torch.optim.AdamW, lr=0.1)),
    "torch sgd": lambda: fzero.optim.from_torch(partial(torch.optim.SGD, lr=0.1, momentum=0.5)),
    "torch adamw, fused=True": lambda: fzero.optim.from_torch(
        partial(torch.optim.AdamW, lr=0.1, fused=True)
    ),
}
READS_ONCE: dict[str, Any] = {
    "lion": lambda: fzero.optim.lion(0.1),
    "torch rmsprop": lambda: fzero.optim.from_torch(torch.optim.RMSprop),
    "torch adamw, foreach=True": lambda: fzero.optim.from_torch(
        partial(torch.optim.AdamW, lr=0.1, foreach=True)
    ),
}
POLICY = DynamicScale(init_scale=16.0, growth_interval=2)


def functional(model: nn.Module, make: Any, stage: int, max_norm: float | None) -> Any:
    apply, params = fzero.functionalize(model)

    step_fn = descends(lambda p, x: apply(p, x).square().mean())
    step = fzero.scale_loss(fzero.clip(step_fn, max_norm=max_norm), POLICY)
    step = fzero.shard(step, stage=stage, donate=True)
    held = [step.init(params, make())]

    def one(x: Tensor) -> None:
        held[0], _ = step(held[0], x)

    return one, lambda: held[0]


def by_engine(model: nn.Module, make: Any, stage: int, max_norm: float | None) -> Any:
    engine = Engine(model, make(), stage=stage, max_norm=max_norm, loss_scale=POLICY)

    def one(x: Tensor) -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return one, lambda: engine.state


def watched_steps(driver: Callable[..., Any], make: Any, stage: int, max_norm: Any) -> Any:
    with on_device("cpu") as watched:
        assert isinstance(watched, Device)
        torch.manual_seed(0)
        model = watched.put(nn.Linear(4, 3))
        xs = [
            watched.put(torch.full((2, 4), float("inf") if n == BAD else n + 1.0))
            for n in range(STEPS)
        ]
        step, state = driver(model, make, stage, max_norm)
        for x in xs[:2]:
            step(x)
        with watched.no_waits():
            for x in xs[2:]:
                step(x)
        return state()


@covered(driver=[functional, by_engine], optimizer=[*FUSED], stage=[0, 1, 3], max_norm=[None, 0.5])
def test_the_host_reads_nothing(driver: Any, optimizer: str, stage: int, max_norm: Any) -> None:
    state = watched_steps(driver, FUSED[optimizer], stage, max_norm)
    assert int(state.step) == int(state.optimizer.count) == STEPS - 1
    assert state.scale.scale.item() == 16.0 * 2 / 2 * 2  # grows after 2, falls, grows after 2
    assert all(torch.isfinite(flat).all() for flat in state.params.flats)


@covered(optimizer=[*READS_ONCE], driver=[functional, by_engine])
def test_a_rule_without_a_fused_kernel_reads_the_overflow(driver: Any, optimizer: str) -> None:
    with pytest.raises(HostReadError):
        watched_steps(driver, READS_ONCE[optimizer], 1, None)


class Own(torch.optim.AdamW):
    """A subclass with a step of its own, which knows no found_inf."""

    def step(self, closure: Any = None) -> Any:
        assert not hasattr(self, "found_inf")
        return super().step(closure)


def test_a_step_of_the_users_own_is_not_called_after_an_overflow() -> None:
    made = nn.Linear(2, 1)
    engine = Engine(made, Own, stage=1, loss_scale="dynamic")
    engine.backward(engine(torch.full((1, 2), float("nan"))).sum())
    engine.step()
    assert engine.step_was_skipped and int(engine.state.optimizer.count) == 0
    assert torch.isfinite(made.weight).all()
    engine.close()


def test_a_schedule_goes_by_the_updates_that_were_made() -> None:
    seen: list[int] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 1.0

    @fzero.scale_loss(scale="dynamic")
    def step(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: (p * x).sum(), state)()
        return fzero.apply_gradients(state), None

    state = fzero.init(torch.zeros(1), fzero.optim.sgd(schedule), stage=0)
    for x in (1.0, float("inf"), 1.0, 1.0):
        state, _ = step(state, torch.tensor(x))
    assert list(dict.fromkeys(seen)) == [0, 1, 2]
    assert fzero.full_params(state).item() == -3.0
