"""Recorded engines are made again, with their buffers, on virtual ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError
from tests.ranks import run_ranks
from tests.tools.record.runs import (
    RANKS,
    batch,
    engine_of,
    same_values,
    train_step,
    values_of,
)


def engine_on_a_rank(rank: int, ranks: int, folder: str) -> Any:
    engine, step = engine_of(3), fzero.record(train_step, every=2)
    torch.manual_seed(rank)
    for number in range(5):
        step(engine, batch(number)[rank].float())
    step.recording.save(folder)
    return engine.full_parameters()


def test_an_engine_is_made_again_with_its_buffers() -> None:
    engine, step = engine_of(2), fzero.record(train_step, every=2, keep=None)
    losses = [step(engine, batch(number)[0].float()) for number in range(5)]
    again = fzero.replay(step.recording, step=4, engine=lambda: engine_of(2))
    assert again.same and torch.equal(again.aux[0], losses[3])
    assert fzero.bisect(step.recording, engine=lambda: engine_of(2)) is None
    with pytest.raises(LayoutError, match="no engine"):
        fzero.replay(step.recording, step=4)


@pytest.mark.xdist_group("gloo")
def test_an_engine_of_processes_is_made_again_in_one(tmp_path: Path) -> None:
    values, _ = run_ranks(engine_on_a_rank, RANKS, str(tmp_path / "run"))
    recording = fzero.load_recording(tmp_path / "run")
    again = fzero.replay(recording, step=5, step_fn=train_step, engine=lambda: engine_of(3))
    assert again.same, again.parted
    same_values(values_of(again.after, RANKS), values)


@pytest.mark.parametrize("keep", [1, None])
def test_a_run_goes_on_after_a_call_that_raised_having_changed_the_engine(keep: Any) -> None:
    def failing(engine: Engine, x: Tensor, fails: bool) -> Tensor:
        loss = train_step(engine, x)
        if fails:
            raise ValueError
        return loss

    engine, step = engine_of(2), fzero.record(failing, every=2, keep=keep)
    for number in range(6):
        with contextlib.suppress(ValueError):
            step(engine, batch(number)[0].float(), number == 2)
    recording = step.recording
    numbers = [call.number for call in recording.calls]
    assert 2 not in numbers and numbers[-1] == 5
    assert fzero.replay(recording, step=6, engine=lambda: engine_of(2)).same
    assert fzero.bisect(recording, engine=lambda: engine_of(2)) is None
