"""A recorded update made again has the same bits, and what went wrong is found where it did."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError, MismatchError
from tests.ranks import run_ranks
from tests.strategies import stages
from tests.tools.record.runs import (
    CALLS,
    RANKS,
    batch,
    model,
    recorded,
    rule,
    same_values,
    step_of,
    values_of,
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"windows": True, "dropout": 0.5}, {"donate": True}, {"mesh": (2, 1)}]
)
def test_any_update_again_has_the_bits_of_the_run(stage: int, options: Any) -> None:
    recording = recorded(stage, **options)
    for update in (1, 4, CALLS):
        again = fzero.replay(recording, step=update)
        assert again.same, again.parted
        assert again.before.step.tolist() == [update - 1] * RANKS
    wanted = values_of(again.after, RANKS)
    if "dropout" not in options:
        for other, ranks in ((0, 1), ((stage + 1) % 4, 4), ((stage + 2) % 4, 2)):
            again = fzero.replay(recording, step=CALLS, stage=other, world_size=ranks)
            same_values(values_of(again.after, ranks), wanted)


def test_what_is_held_is_bounded_and_said(tmp_path: Path) -> None:
    recording = recorded(2, every=2, keep=2)
    assert [kept.updates for kept in recording.kept] == [4, 6]
    assert [call.number for call in recording.calls] == [4, 5, 6]
    assert repr(recording).startswith("Recording(updates 5 to 7 of a step at stage 2, all ranks of")
    with pytest.raises(LayoutError, match="update 4 is not recorded"):
        fzero.replay(recording, step=4)
    step, state = step_of(0)
    step = fzero.record(step, every=1, keep=None, max_bytes=1200, folder=tmp_path)
    for number in range(6):
        state, _ = step(state, batch(number))
        assert step.recording.nbytes <= 1200
    assert len(step.recording.kept) == len(step.recording.calls) == 3
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        f"state-{number:08d}" for number in (3, 4, 5)
    ]
    assert fzero.replay(step.recording, step=6).same


def test_a_call_that_raises_is_not_recorded() -> None:
    step, state = step_of(2)
    step = fzero.record(step, every=2)
    state, _ = step(state, batch(0))
    with pytest.raises(RuntimeError):
        step(state, batch(1)[..., :2])
    state, _ = step(state, batch(1))
    assert len(step.recording.calls) == 2 and fzero.replay(step.recording, step=2).same


# What went wrong.


@given(st.data(), stages)
@settings(max_examples=max(8, settings().max_examples // 8), deadline=None)
def test_a_flipped_bit_is_found_at_its_update_leaf_and_rank(data: Any, stage: int) -> None:
    when, rank = data.draw(st.integers(1, CALLS - 1)), data.draw(st.integers(0, RANKS - 1))
    what, bit = data.draw(st.sampled_from(["parameter", "moment"])), data.draw(st.integers(0, 51))

    def spoil(number: int, state: Any, x: Tensor) -> Any:
        if number == when:
            flats = state.params.flats if what == "parameter" else state.optimizer.moments[0]
            flat = flats[0][rank]
            place = data.draw(st.sampled_from(flat.nonzero().flatten().tolist()))
            flat.view(torch.int64)[place] ^= 1 << bit
        return state, x

    recording = recorded(stage, spoil=spoil)
    parting = fzero.bisect(recording)
    assert parting is not None and (parting.update, parting.ranks) == (when, (rank,))
    assert len(parting.leaves) == 1 and parting.replays == 1
    assert parting.leaves[0].startswith("parameter" if what == "parameter" else "exp_avg")


def test_a_batch_that_came_twice_shows_against_a_sound_run() -> None:
    sound = recorded(3)
    twice = recorded(3, spoil=lambda n, state, x: (state, batch(3) if n == 4 else x))
    parting = fzero.bisect(twice, sound)
    assert parting is not None and (parting.update, parting.call) == (5, 4)
    assert fzero.bisect(twice) is None and fzero.bisect(sound, sound) is None
    assert "the states differ from update 5 on" in str(parting)


def test_a_step_that_is_another_one_parts_at_the_first_update() -> None:
    recording = recorded(1)
    other, _ = step_of(1, dropout=0.5)
    parting = fzero.bisect(recording, other)
    assert parting is not None and parting.update == 1
    good, _ = step_of(1)
    assert fzero.bisect(recording, good) is None


def test_ranks_that_part_are_told_at_the_next_state_that_is_kept() -> None:
    step, state = step_of(1, ranks=3)
    step = fzero.record(step, every=2)
    for number in range(2):
        state, _ = step(state, batch(number, 3))
    state.params.flats[0][1].view(torch.int64)[0] ^= 1 << 40
    with pytest.raises(MismatchError, match="after 2 updates rank 1 has other values of parameter"):
        step(state, batch(2, 3))


def test_a_run_whose_ranks_have_parted_may_go_on_with_a_warning() -> None:
    step, state = step_of(0)
    step = fzero.record(step, every=1, parted="warn")
    state, _ = step(state, batch(0))
    state.params.flats[0][1].view(torch.int64)[0] ^= 1 << 40
    with pytest.warns(UserWarning, match=r"none of them most; .* show rank 1 wrong first"):
        state, _ = step(state, batch(1))
    assert len(step.recording.calls) == 2


def test_what_cannot_be_recorded_or_made_again_is_refused() -> None:
    step, state = step_of(0)
    wrong: Any = (
        ({"every": 0}, "every=0"),
        ({"every": 1, "keep": 0}, "keep=0"),
        ({"every": 1, "parted": "no"}, "parted='no'"),
    )
    for options, words in wrong:
        with pytest.raises(LayoutError, match=words):
            fzero.record(step, **options)
    recorder = fzero.record(step, every=1)
    with pytest.raises(LayoutError, match="no recording yet"):
        _ = recorder.recording
    recorder(state, batch(0))
    with pytest.raises(LayoutError, match="does not go on 3 ranks evenly"):
        fzero.replay(recorder.recording, step=1, world_size=3)
    with pytest.raises(LayoutError, match=r"has no fzero\.shard"):
        fzero.replay(recorder.recording, step=1, step_fn=lambda state, x: (state, x))
    with pytest.raises(LayoutError, match="after those of"):
        recorder(step_of(1)[1], batch(0))


# Processes, and files.


def on_a_rank(rank: int, ranks: int, folder: str, flips: bool) -> Any:
    apply, params = fzero.functionalize(model())

    @fzero.record(every=2, keep=None)
    @fzero.shard(stage=2)
    def step(state: Any, batch: Any) -> Any:
        rows, _ = batch["x"], batch["name"]
        state, loss = fzero.grad_and_reduce(
            lambda p, x: F.dropout(apply(p, x).square(), 0.5).mean(), state
        )(rows)
        return fzero.apply_gradients(state), loss

    torch.manual_seed(rank)
    state = step.init(params, rule())
    for number in range(5):
        if flips and rank and number == 3:
            state.optimizer.moments[0][0].view(torch.int64)[0] ^= 1 << 50
        rows = batch(number)[rank, : 4 - rank]  # ranks with other numbers of rows
        state, _ = step(state, {"x": rows, "name": f"batch {number}"})
    step.recording.save(folder)
    return fzero.full_params(state)


def loaded_init(step: Any) -> Any:
    return step.init(fzero.functionalize(model())[1], rule())


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("flips", [False, True])
def test_a_run_of_processes_is_made_again_in_one(tmp_path: Path, flips: bool) -> None:
    values, _ = run_ranks(on_a_rank, RANKS, str(tmp_path / "run"), flips)
    recording = fzero.load_recording(tmp_path / "run")
    assert recording.calls[0].inputs[1][0][0]["name"] == "batch 0"
    apply, _ = fzero.functionalize(model())

    @fzero.shard(stage=2)
    def step(state: Any, batch: Any) -> Any:
        state, loss = fzero.grad_and_reduce(
            lambda p, x: F.dropout(apply(p, x).square(), 0.5).mean(), state
        )(batch["x"])
        return fzero.apply_gradients(state), loss

    replayed = functools.partial(fzero.replay, recording, step_fn=step, init=loaded_init)
    assert replayed(step=2).same
    parting = fzero.bisect(recording, step, init=loaded_init)
    if flips:
        assert parting is not None and (parting.update, parting.ranks) == (3, (1,))
        assert parting.leaves[0].startswith("exp_avg")
    else:
        assert parting is None
        same_values(values_of(replayed(step=5).after, RANKS), values)
    with pytest.raises(LayoutError, match="no step_fn"):
        fzero.replay(recording, step=1)
    with pytest.raises(LayoutError, match="has no optimizer"):
        fzero.replay(recording, step=1, step_fn=step)


def test_elements_that_changed_places_show_where_states_are_kept() -> None:
    def swapped(number: int, state: Any, x: Tensor) -> Any:
        if number == 3:  # a state is kept before this call
            flat = state.params.flats[0][1]
            flat[:2] = flat[:2].flip(0).clone()
        return state, x

    step, state = step_of(1, ranks=3)
    step = fzero.record(step, every=3)
    with pytest.raises(MismatchError, match="rank 1 has other values of parameter"):
        for number in range(4):
            state, x = swapped(number, state, batch(number, 3))
            state, _ = step(state, x)
    recording = recorded(3, spoil=swapped)
    parting = fzero.bisect(recording)
    assert parting is not None and (parting.update, parting.ranks) == (3, (1,))


def test_a_first_call_that_raises_leaves_no_recording() -> None:
    step, state = step_of(0)
    step = fzero.record(step, every=1)
    with pytest.raises(RuntimeError):
        step(state, batch(0)[..., :2])
    with pytest.raises(LayoutError, match="no recording yet"):
        _ = step.recording
    step(state, batch(0))
    assert fzero.replay(step.recording, step=1).same


@pytest.mark.parametrize("mesh", [{"data": 2, "seq": 2}, fzero.Mesh({"data": 2, "seq": 2})])
def test_a_loss_that_names_an_axis_is_made_again(mesh: Any) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return fzero.psum((p["w"] * x).sum(), axis="seq") ** 2

    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    step = fzero.record(
        fzero.simulate(fzero.shard(step_fn, stage=3, mesh=mesh), world_size=4), every=9
    )
    state = step.init({"w": torch.arange(6.0)}, fzero.optim.sgd(2**-9))
    for number in range(3):
        state, _ = step(state, torch.arange(24.0).view(4, 6) + number)
    assert fzero.replay(step.recording, step=2).same
    assert fzero.replay(step.recording, step=3, stage=0).same
    assert fzero.bisect(step.recording) is None
