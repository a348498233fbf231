"""Autocast in fp16 brings a dynamic loss scale, unless another one is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, initialize
from fzero.errors import LayoutError, PhaseError
from tests.autocast.mixed import LR, STAGES, Mixed, data, on_ranks

FP16 = torch.float16


def stepped(**options: Any) -> Any:
    """A state of one weight before its first step, and the step."""
    apply, params = fzero.functionalize(nn.Linear(2, 1, bias=False))

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: apply(p, x).float().sum() / 4, state)()
        return fzero.apply_gradients(state), loss

    wraps = options.pop("wraps", lambda fn: fn)
    step: Any = fzero.shard(wraps(fzero.autocast(step_fn, dtype=FP16)), stage=0)
    return step, step.init(params, fzero.optim.sgd(LR))


def test_a_step_has_the_dynamic_scale_from_its_init_on() -> None:
    step, state = stepped()
    assert state.scale.policy == fzero.DynamicScale()
    before = fzero.full_params(state)["weight"].clone()
    state, _ = step(state, torch.ones(1, 2))
    assert torch.equal(fzero.full_params(state)["weight"], before - LR / 4)
    after, _ = step(state, torch.full((1, 2), 1e30))  # infinite in fp16
    assert after.scale.overflowed and after.scale.scale == state.scale.scale / 2
    assert torch.equal(fzero.full_params(after)["weight"], before - LR / 4)


def test_a_scale_of_the_users_stays() -> None:
    own = fzero.DynamicScale(init_scale=8.0)
    for wraps in (lambda fn: fzero.scale_loss(fn, own), lambda fn: fzero.scale_loss(fn, 8.0)):
        step, state = stepped(wraps=wraps)
        state, _ = step(state, torch.ones(1, 2))
        assert state.scale.scale == 8.0


@pytest.mark.parametrize("stage", STAGES)
def test_both_drivers_train_alike_where_gradients_would_vanish(stage: int) -> None:
    """A loss of 2**-30 has gradients that fp16 rounds to 0, unless they are scaled."""
    tiny = 2.0**-30

    def by_engine(rank: int) -> dict[str, Tensor]:
        module = Mixed()
        optimizer = torch.optim.SGD(module.parameters(), 2.0**20)
        engine = Engine(module, optimizer, stage=stage, autocast=FP16)
        assert engine.needs_scaler()
        with pytest.raises(PhaseError, match="without engine"):
            engine(data(rank, 0)).backward()
        engine.backward(engine(data(rank, 0)).float() * tiny)
        engine.step()
        return engine.full_parameters()

    def by_function(rank: int) -> dict[str, Tensor]:
        apply, params = fzero.functionalize(Mixed())

        @fzero.autocast(dtype=FP16)
        def step_fn(state: Any) -> Any:
            def loss_fn(p: Any) -> Tensor:
                return apply(p, data(rank, 0)).float() * tiny

            state, loss = fzero.grad_and_reduce(loss_fn, state)()
            return fzero.apply_gradients(state), loss

        step: Any = fzero.shard(step_fn, stage=stage)
        return fzero.full_params(step(step.init(params, fzero.optim.sgd(2.0**20)))[0])

    first, second = on_ranks(by_engine, 2), on_ranks(by_function, 2)
    before = Mixed().state_dict()
    assert not torch.equal(first["first.weight"], before["first.weight"])
    assert all(torch.equal(first[path], value) for path, value in second.items())


def test_loss_scale_1_switches_it_off() -> None:
    engine = Engine(nn.Linear(2, 1), torch.optim.SGD, stage=0, autocast=FP16, loss_scale=1.0)
    assert not engine.needs_scaler()
    engine(torch.ones(1, 2)).float().sum().backward()
    engine.step()


def configured(**section: Any) -> Engine:
    return initialize(nn.Linear(2, 1), config={"torch_autocast": section})


def test_a_config_asks_for_it() -> None:
    assert configured(enabled=True).state.setup.policy.autocast is torch.bfloat16
    engine = configured(enabled=True, dtype="fp16")
    assert engine.state.setup.policy.autocast is FP16 and engine.needs_scaler()
    assert configured(enabled=False, dtype="fp16").state.setup.policy.autocast is None
    named = configured(enabled=True, lower_precision_safe_modules=["torch.nn.Conv1d"])
    assert all(g.communication_dtype is None for g in named.state.setup.layout.groups)
    assert all(
        g.communication_dtype is torch.bfloat16
        for g in configured(enabled=True).state.setup.layout.groups
    )


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ({"torch_autocast": {"dtype": "bf16"}}, "torch_autocast.dtype without"),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "beside fp16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "torch_autocast.dtype"),
        ({"torch_autocast": {"enabled": True, "no_such": 1}}, "torch_autocast.no_such"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config: dict[str, Any], seen: str) -> None:
    with pytest.raises(LayoutError, match=seen):
        initialize(nn.Linear(2, 1), config=config)
