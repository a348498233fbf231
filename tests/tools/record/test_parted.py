"""Ranks that have parted: who computes wrong, where no rank is in the minority."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import MismatchError
from tests.ranks import run_ranks
from tests.tools.record.runs import batch, step_of, train_step


def flip(flat: torch.Tensor) -> None:
    flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int64)[0] ^= 1 << 20


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_computes_wrong_is_named_with_its_update(stage: int, rank: int) -> None:
    step, state = step_of(stage, dropout=0.5)
    step = fzero.record(step, every=4)
    when = 3 if stage == 0 else 4  # at stages 1 and 2 the next update's all-gather mends it
    wanted = f"after 4 updates .* show rank {rank} wrong first: in param.*, after {when} updates"
    with pytest.raises(MismatchError, match=wanted):
        for number in range(6):
            if number == when:
                flip(state.params.flats[0][rank])
            state, _ = step(state, batch(number))


def test_ranks_that_part_from_the_start_are_told_without_a_guess() -> None:
    step, state = step_of(0)
    flip(state.params.flats[0][1])
    with pytest.raises(MismatchError, match=r"after 0 updates .* none of them most\.\n"):
        fzero.record(step, every=4)(state, batch(0))


def test_a_step_that_cannot_be_made_again_is_told_without_a_guess() -> None:
    step, state = step_of(0)
    left = iter(range(2))

    def once(state: Any, x: Any) -> Any:
        next(left)  # raises, the third time
        return step(state, x)

    recorder = fzero.record(once, every=2)
    state, _ = recorder(state, batch(0))
    state, _ = recorder(state, batch(1))
    flip(state.params.flats[0][1])
    with pytest.raises(MismatchError, match=r"after 2 updates .* none of them most\.\n"):
        recorder(state, batch(2))


def engine_that_flips(rank: int, ranks: int, recorded: bool) -> tuple[str, Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 1))
    engine = Engine(module, torch.optim.AdamW(module.parameters(), 0.1), stage=0)
    step = fzero.record(train_step, every=3, parted="warn") if recorded else train_step
    torch.manual_seed(rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(5):
            if rank and number == 2:
                flip(
                    engine.state.params.flats[0][1:]
                )  # an element that the engine's sample has not
            step(engine, batch(number)[rank].float())
    buffers = {name: x.clone() for name, x in module.named_buffers()}
    return " ".join(str(one.message) for one in told), engine.full_parameters(), buffers


@pytest.mark.xdist_group("gloo")
def test_an_engine_goes_on_as_it_was_after_its_calls_were_made_again() -> None:
    plain = run_ranks(engine_that_flips, 2, False)
    for (told, params, buffers), (_, *wanted) in zip(
        run_ranks(engine_that_flips, 2, True), plain, strict=True
    ):
        assert "show rank 1 wrong first: in parameter" in told and "after 2 updates" in told
        for found, one in zip((params, buffers), wanted, strict=True):
            assert all(torch.equal(x, one[name]) for name, x in found.items())
