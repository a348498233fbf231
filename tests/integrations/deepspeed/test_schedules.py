"""The schedules of a config: DeepSpeed's formulas, stepped as the engine steps, saved with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from fzero.adapter import initialize
from tests.integrations.deepspeed.configs import linear

LR = 0.5


def rates(name: str, count: int, *, betas: bool = False, **params: Any) -> list[float]:
    """What each of the first `count` updates uses."""
    adam = {"type": "Adam", "params": {"lr": LR}}
    config = {"optimizer": adam, "scheduler": {"type": name, "params": params}}
    engine = initialize(linear(), config=config)
    assert isinstance(engine.lr_scheduler, LambdaLR) and engine.optimizer is not None
    engine.backward(engine(torch.ones(1, 3)).sum())
    found = []
    for number in range(count):
        (group,) = engine.optimizer.param_groups
        assert engine.lr_scheduler.get_last_lr() == engine.lr_scheduler.get_lr() == [group["lr"]]
        assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": number - 1}
        found.append(group["betas"][0] if betas else group["lr"])
        engine.lr_scheduler.step() if number else engine.step()
    engine.close()
    return found


LOG2 = math.log(2) / math.log(4)
WARM = {"warmup_min_lr": 0.25, "warmup_max_lr": 1.25, "warmup_num_steps": 4}
LINEAR = {**WARM, "warmup_type": "linear"}
HALF_COSINE = [(1 + math.cos(math.pi * s / 4)) / 2 for s in (1, 2, 3, 4)]
CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2}
DECAY = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.5}
MOMENTUM = {"cycle_min_mom": 0.5, "cycle_max_mom": 0.75}

NUMBERS: list[tuple[str, dict[str, Any], list[float]]] = [
    # The first number is that of the first update: nothing was stepped yet.
    ("WarmupLR", LINEAR, [0.25, 0.25, 0.5, 0.75, 1.0, 1.25, 1.25]),
    ("WarmupLR", WARM, [0.25, 0.25, 0.25 + LOG2, 0.25 + math.log(3) / math.log(4), 1.25, 1.25]),
    ("WarmupLR", {"warmup_num_steps": 1}, [0.0, 0.0, LR, LR]),
    ("WarmupLR", {"warmup_num_steps": "2", "warmup_max_lr": [0.75]}, [0.0, 0.0, 0.75]),
    (
        "WarmupDecayLR",
        {**LINEAR, "total_num_steps": 8},
        [0.25, 0.25, 0.5, 0.75, 1.0, 1.25, 1.0, 0.75, 0.5, 0.25, 0.25],
    ),
    (
        "WarmupDecayLR",
        {"warmup_type": "linear", "warmup_num_steps": 2, "total_num_steps": 4},
        [0.0, 0.0, 0.0005, 0.001, 0.0005, 0.0],
    ),
    (
        "WarmupCosineLR",
        {"warmup_type": "linear", "warmup_num_steps": 2, "total_num_steps": 6, "cos_min_ratio": 0},
        [0.0, 0.0, LR / 2, *(LR * x for x in HALF_COSINE), 0.0],
    ),
    (
        "WarmupCosineLR",
        {
            "warmup_num_steps": 4,
            "total_num_steps": 4,
            "warmup_min_ratio": 0.5,
            "cos_min_ratio": 0.1,
        },
        [0.0, LR / 2, LR * 0.75, LR * (0.5 + math.log(3) / math.log(16)), LR, LR * 0.1],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 4.0},
        [0.5, 1.5, 2.5, 3.5, 4.5],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2, "lr_range_test_staircase": 1},
        [0.5, 0.5, 1.0, 1.0, 1.5],
    ),
    ("OneCycle", CYCLE, [1.0, 2.0, 3.0, 2.0, 1.0, 1.0, 1.0]),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 4}, [1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1.0]),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [1.0, 1.0, 2.0, 2.0, 3.0, 2.0, 2.0, 1.0, 1.0],
    ),
    ("OneCycle", {**CYCLE, **DECAY}, [1.0, 2.0, 3.0, 2.0, 1.0, 0.8, 1 / 1.5]),
]


@pytest.mark.parametrize(("name", "params", "wanted"), NUMBERS)
def test_the_rates_are_those_of_the_formulas(
    name: str, params: dict[str, Any], wanted: list[float]
) -> None:
    assert rates(name, len(wanted), **params) == pytest.approx(wanted, abs=1e-15)


def test_a_cycle_moves_the_momentum_the_other_way() -> None:
    cycle = {**CYCLE, **MOMENTUM}
    # As in DeepSpeed, the first update has the least momentum.
    assert rates("OneCycle", 6, betas=True, **cycle) == [0.5, 0.625, 0.5, 0.625, 0.75, 0.75]
    decays = rates("OneCycle", 7, betas=True, **cycle, **DECAY)
    assert decays[5:] == [0.75 * 1.25, 0.75 * 1.5]
    assert rates("OneCycle", 3, betas=True, **cycle, cycle_momentum=False) == [0.9] * 3


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (3, 3), (4, 9), (9, 4)])
def test_a_warm_up_never_falls_and_a_decay_never_rises(
    name: str, kind: str, warmup: int, total: int
) -> None:
    steps = max(2, warmup)
    params = {"warmup_type": kind, "warmup_num_steps": warmup, "total_num_steps": total}
    found = rates(name, 12, **params)
    rising, falling = found[: steps + 1], found[steps + 1 :]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert all(0 <= x <= LR for x in found)


def config(steps: int = 1) -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "scheduler": {"type": "WarmupLR", "params": LINEAR},
    }


def test_the_engine_steps_it_after_each_update_and_a_checkpoint_has_it(tmp_path: Path) -> None:
    engine = initialize(linear(), config=config(steps=2))
    used = []
    for _ in range(8):
        engine.backward(engine(torch.ones(1, 3)).sum())
        used.append(engine.get_lr()[0])
        engine.step()
    assert used == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    engine.save_checkpoint(tmp_path)
    other = initialize(linear(), config=config(steps=2))
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == other.lr_scheduler.get_last_lr() == [1.0]
    other.lr_scheduler.step()
    assert other.get_lr() == [1.25]
    anew = initialize(linear(), config=config(steps=2))
    anew.load_checkpoint(tmp_path, load_lr_scheduler_states=False, load_optimizer_states=False)
    assert anew.get_lr() == [0.25] and anew.global_steps == 4


def test_a_name_of_torch_makes_torchs_scheduler() -> None:
    step = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    engine = initialize(linear(), config={**config(), "scheduler": step})
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.StepLR)
    assert engine.get_lr() == [LR / 2]
