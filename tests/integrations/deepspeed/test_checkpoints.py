"""save_checkpoint and load_checkpoint: a folder for each tag, a file that names the latest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.adapter import initialize
from fzero.errors import FzeroError, LayoutError
from fzero.integrations.deepspeed import DeepSpeedEngine
from tests.adapter.nets import Odd
from tests.adapter.on_ranks import on_ranks
from tests.adapter.plain import Draw, back, same, seeded
from tests.integrations.deepspeed.configs import linear, merged

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}}


def engine_of(stage: int, **config: Any) -> DeepSpeedEngine:
    given = merged(ADAM, WARMUP, {"zero_optimization": {"stage": stage}}, config)
    return initialize(seeded(Odd), config=given)


def train(engine: DeepSpeedEngine, rank: int, steps: range) -> list[Tensor]:
    """Train, and return all parameters after each step."""
    found = []
    for number in steps:
        back(engine, Draw(rank, number))
        engine.step()
        found.append(torch.cat([x.flatten() for x in engine.full_parameters().values()]))
    return found


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_training_goes_on_from_the_latest_and_from_any_tag(
    rank: int, stage: int, tmp_path: Path
) -> None:
    engine = engine_of(stage)
    train(engine, rank, range(2))
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "seen": [1, 2]})
    middle = train(engine, rank, range(2, 4))
    engine.save_checkpoint(tmp_path, tag="best", save_latest=False)
    wanted = [*middle, *train(engine, rank, range(4, 6))]
    assert (tmp_path / "latest").read_text() == "global_step2"

    other = engine_of(stage)
    path, client = other.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step2") and client == {"epoch": 3, "seen": [1, 2]}
    assert other.global_steps == 2 and other.get_lr() == engine_at(engine, 2)
    again = train(other, rank, range(2, 6))
    assert all(torch.equal(x, y) for x, y in zip(again, wanted, strict=True))

    path, client = other.load_checkpoint(tmp_path, tag="best")
    assert path == str(tmp_path / "best") and client == {}
    again = train(other, rank, range(4, 6))
    assert all(torch.equal(x, y) for x, y in zip(again, wanted[2:], strict=True))


def engine_at(engine: DeepSpeedEngine, steps: int) -> list[float]:
    """The rates of an engine after so many updates."""
    now = engine.lr_scheduler.last_batch_iteration
    engine.lr_scheduler.load_state_dict({"last_batch_iteration": steps - 1})
    found = engine.get_lr()
    engine.lr_scheduler.load_state_dict({"last_batch_iteration": now})
    return found


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_module_alone_leaves_the_optimizer_the_rates_and_the_counts(
    rank: int, stage: int, tmp_path: Path
) -> None:
    saved = engine_of(stage, bf16={"enabled": stage >= 2})
    low = torch.bfloat16 if stage >= 2 else torch.float64

    def backward(engine: DeepSpeedEngine, number: int) -> None:
        engine.backward(engine(Draw(rank, number)(2, 3, dtype=low)).float().square().mean())
        engine.step()

    for number in range(3):
        backward(saved, number)
    saved.save_checkpoint(tmp_path)
    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        other = engine_of(stage, bf16={"enabled": stage >= 2})
        backward(other, 7)
        states, rate = other.full_optimizer_states(), other.optimizer.param_groups[0]["betas"]
        other.load_checkpoint(tmp_path, **options)
        for path, state in states.items():
            same(other.full_optimizer_states()[path], state, 0.0, path)
        assert other.optimizer.param_groups[0]["betas"] == rate
        module_only = "load_module_only" in options
        assert other.global_steps == int(other.state.step) == (1 if module_only else 3)
        assert other.lr_scheduler.last_batch_iteration == (0 if module_only else 2)
        same(other.full_state_dict(), saved.full_state_dict(), 0.0)
        same(other.full_parameters(), saved.full_parameters(), 2.0**-7)  # masters of 16 bits
        backward(other, 8)


@on_ranks(2)
def test_without_a_latest_nothing_is_loaded_and_what_is_wrong_is_raised_everywhere(
    rank: int, tmp_path: Path
) -> None:
    engine = initialize(linear(), config=ADAM)
    before = engine.full_parameters()
    with pytest.warns(UserWarning, match="no file .*latest; nothing was loaded"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(FzeroError):
        engine.load_checkpoint(tmp_path, tag="nowhere")
    with pytest.raises(LayoutError, match="JSON"):
        engine.save_checkpoint(tmp_path, client_state={"x": object()})
    with pytest.raises(FzeroError):
        engine.save_checkpoint(tmp_path, tag=f"rank{rank}")
    assert not (tmp_path / "latest").exists()
    same(engine.full_parameters(), before, 0.0)
