"""initialize(): the fp16 section gives a loss scale, and what it cannot give is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import DynamicScale, initialize
from fzero.errors import LayoutError
from fzero.state.scale import StaticScale
from tests.integrations.deepspeed.configs import SGD, linear, merged

DEEPSPEED = DynamicScale(init_scale=2.0**16, growth_interval=1000, hysteresis=2, min_scale=1.0)


def config(**fp16: Any) -> dict[str, Any]:
    return merged(SGD, {"fp16": fp16})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, DEEPSPEED),
        ({"loss_scale": 0}, DEEPSPEED),
        ({"loss_scale": 128}, StaticScale(128.0)),
        ({"initial_scale_power": 4}, replace(DEEPSPEED, init_scale=16.0)),
        ({"loss_scale_window": 50}, replace(DEEPSPEED, growth_interval=50)),
        ({"hysteresis": 1}, replace(DEEPSPEED, hysteresis=1)),
        ({"min_loss_scale": 0.5}, replace(DEEPSPEED, min_scale=0.5)),
        ({"consecutive_hysteresis": False, "auto_cast": False}, DEEPSPEED),
    ],
)
def test_each_key_sets_its_number(given: dict[str, Any], wanted: Any) -> None:
    model = linear()
    engine = initialize(model, config=config(enabled=True, **given))
    assert engine.options.updating.loss_scale == wanted
    assert engine.needs_scaler()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert engine.memory_report().masters.keys() == {torch.float32}
    engine.close()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"enabled": True, "initial_scale_power": 200}, r"fp16\.initial_scale_power = 200: give"),
        (
            {"enabled": True, "min_loss_scale": 2.0**20},
            r"min_scale=1048576.*init_scale=65536",
        ),
        ({"loss_scale": 128}, r"fp16\.loss_scale without fp16\.enabled"),
    ],
)
def test_what_cannot_be_is_refused_by_name(section: dict[str, Any], named: str) -> None:
    model = linear()
    with pytest.raises(LayoutError, match=f"(?s){named}"):
        initialize(model, config=config(**section))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("off", [{"enabled": False, "loss_scale": 128, "what": 1}, {}, None])
def test_a_section_that_is_off_scales_nothing(off: Any) -> None:
    engine = initialize(linear(), config=merged(SGD, {"fp16": off}))
    assert not engine.needs_scaler()
    engine.close()


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_skips_the_update_and_the_scheduler(stage: int, optimizer: str) -> None:
    model = nn.Linear(4, 2)
    engine = initialize(
        model,
        config={
            "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": optimizer, "params": {"lr": 0.5}},
        },
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5),
    )
    assert engine.optimizer is not None
    rates, scales = [], []
    for bad in (False, True, False):
        x = torch.full((1, 4), float("inf") if bad else 1.0, dtype=torch.float16)
        before = engine.full_parameters()
        engine.backward(engine(x).float().sum())
        engine.step()
        moved = any(not torch.equal(v, before[k]) for k, v in engine.full_parameters().items())
        assert moved is not bad and engine.step_was_skipped is bad
        rates.append(engine.optimizer.param_groups[0]["lr"])
        scales.append(engine.loss_scale)
    assert rates == [0.25, 0.25, 0.125] and scales == [256.0, 128.0, 128.0]
    engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "given",
    [
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        {"fp16": {"enabled": True, "loss_scale": 1}},
    ],
)
def test_without_a_scale_an_overflow_skips_the_update_too_and_a_plain_backward_does(
    given: dict[str, Any], stage: int
) -> None:
    looks = "check_grad_overflow" not in given.get("bf16", {})
    engine = initialize(
        linear(), config=merged(SGD, given, {"zero_optimization": {"stage": stage}})
    )
    assert not engine.needs_scaler() and engine.loss_scale == 1.0
    for bad in (False, True, False):
        before = engine.full_parameters()
        dtype = next(engine.module.parameters()).dtype
        x = torch.full((1, 3), float("inf") if bad else 1.0, dtype=dtype)
        engine(x).float().sum().backward()
        assert engine.step() and engine.was_step_applied() is not (bad and looks)
        after = engine.full_parameters()
        assert all(torch.equal(after[k], v) for k, v in before.items()) is (bad and looks)
        if not looks and bad:
            break
        assert all(value.isfinite().all() for value in after.values())
    engine.close()
