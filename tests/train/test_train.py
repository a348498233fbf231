"""The job in this process and on gloo ranks: it learns, resumes exactly, stops on every rank."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, save
from fzero.data import Order
from fzero.errors import LayoutError, NonFiniteError
from tests.ranks import run_ranks
from tests.train.runs import saved_losses, saved_tensors, small
from train import train as module
from train.saving import find_checkpoint, read_facts
from train.step import Job, make_batches
from train.train import train

TIER_INPUTS = ("examples/train",)  # tests/tiers.py: a push that changes them runs these tests


def train_rank(rank: int, world_size: int, given: dict[str, Any]) -> int:
    return train(given)


def stop_one_rank(rank: int, world_size: int, given: dict[str, Any]) -> int:
    with interrupted(at=2 if rank == 1 else 10**9):
        return train(given)


def differ_by_rank(rank: int, world_size: int, given: dict[str, Any]) -> int:
    return train({**given, "lr": 0.1 + rank})


def interrupted(*, at: int) -> Any:
    """Get SIGTERM while step `at` is prepared."""

    def batches(job: Job, order: Order) -> Any:
        if order.position == at:
            signal.raise_signal(signal.SIGTERM)
        return make_batches(job, order)

    return mock.patch.object(module, "make_batches", batches)


def assert_same_run(one: Path, two: Path) -> None:
    """Bit for bit."""
    assert saved_losses(one) == saved_losses(two)
    pairs = list(zip(saved_tensors(one), saved_tensors(two), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(pairs) > 10


def test_it_learns(tmp_path: Path) -> None:
    given = small(tmp_path, steps=150, warmup=10, width=32, lr=1e-2, layers=1)
    assert train(given) == 0
    losses = saved_losses(tmp_path)
    assert len(losses) == 150
    assert sum(losses[-10:]) / 10 < losses[0] - 1.5


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "lion", "stage": 3, "dtype": "bfloat16"},
        {
            "optimizer": "sgd",
            "stage": 0,
            "micro_batches": 2,
            "accumulate": 2,
            "coalesce": False,
            "logical_ranks": 2,
        },
    ],
    ids=lambda options: options["optimizer"],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    train(small(tmp_path / "whole", save_every=3, **options))
    resumed = {"resume": tmp_path / "whole" / "step-000003", "out": tmp_path / "rest"}
    train({**resumed, "plot": False, "sample_bytes": 0})
    assert_same_run(tmp_path / "whole", tmp_path / "rest")


def test_a_signal_ends_the_run_after_the_step_and_it_continues(tmp_path: Path) -> None:
    train(small(tmp_path / "whole"))
    before = signal.getsignal(signal.SIGTERM)
    with interrupted(at=2):
        assert train(small(tmp_path / "cut")) == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert find_checkpoint(tmp_path / "cut").name == "step-000003"
    assert train(small(tmp_path / "cut", resume=tmp_path / "cut")) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_finished_run_is_only_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small(tmp_path))
    first = capsys.readouterr().out
    train(small(tmp_path, resume=tmp_path))
    again = capsys.readouterr().out
    assert "checkpoint:" in first and "checkpoint:" not in again
    assert first.splitlines()[-1] == again.splitlines()[-1]
    finished, command, *_ = again.splitlines()
    assert finished == "this run is finished: its 6 steps are done; for 6 more:"
    assert command.endswith(
        f"examples/train --resume {tmp_path} --sample-bytes 0 --no-plot --quiet --steps 12"
    )


def test_a_resumed_run_goes_on_in_its_folder_unless_told_otherwise(tmp_path: Path) -> None:
    train(small(tmp_path / "a", steps=2))
    common = {"plot": True, "sample_bytes": 0, "quiet": True}
    train({**common, "resume": tmp_path / "a" / "step-000002", "steps": 3})
    assert find_checkpoint(tmp_path / "a").name == "step-000003"
    train({**common, "resume": tmp_path / "a", "out": tmp_path / "b"})  # nothing left to train
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["loss.png", "run"]
    with pytest.raises(LayoutError, match=r"holds files of another run: loss.png\."):
        train(small(tmp_path / "b"))


def test_a_folder_of_another_run_is_refused_unless_told(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(small(one, steps=2))
    two.mkdir()
    (two / "notes.txt").touch()  # a file of the user's own is in nobody's way
    train(small(two, steps=2, seed=1))
    before = sorted(path.name for path in two.iterdir())
    for given in (small(two), small(two, resume=one)):
        with pytest.raises(LayoutError, match=rf"(?s)--out {two} holds .*: latest.*--overwrite"):
            train(given)
    assert sorted(path.name for path in two.iterdir()) == before
    train(small(two, resume=two / "step-000002", steps=3))  # the same folder by another name
    train(small(two, steps=1, overwrite=True))
    assert find_checkpoint(two).name == "step-000001"


def test_a_change_of_course_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(tmp_path, steps=2))
    train(small(tmp_path, resume=tmp_path, steps=3, text_mb=0.2, quiet=False))
    told = "not an exact continuation, changed: --steps 2 -> 3, --text-mb 0.1 -> 0.2, the text"
    assert told in capsys.readouterr().out


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    given = small(tmp_path, optimizer="sgd", lr=1e30, clip=0.0, save_every=1)
    message = r"(?s)the loss of rank 0 is NaN or infinite.*a learning rate that is too high.*Fix: "
    with pytest.raises(NonFiniteError, match=message):
        train(given)
    assert len(saved_losses(tmp_path)) >= 1  # what was saved before is still there


def test_what_holds_no_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s){tmp_path}.*Fix: "):
        train({"resume": tmp_path})
    state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=0)
    save(tmp_path, state, extra={"epoch": 3})  # by another program
    message = r"(?s)no run of this job: \['epoch'\].*Fix: pass the --out"
    with pytest.raises(LayoutError, match=message):
        train({"resume": tmp_path})


def test_a_failed_write_says_so_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    train(small(tmp_path, steps=2))
    (tmp_path / "step-000004").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"(?s)step-000004.*Fix: "):
        train(small(tmp_path, resume=tmp_path, steps=4))
    assert len(saved_losses(tmp_path)) == 2


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"stage": 2, "accumulate": 2, "coalesce": False}),
        (3, {"stage": 3, "micro_batches": 2}),
    ],
    ids=["2 ranks", "3 ranks"],
)
def test_any_number_of_ranks_trains_as_one_does_bit_for_bit(
    tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    given = {"logical_ranks": 4, **options}
    train(small(tmp_path / "one", **{**given, "stage": 0}))
    run_ranks(train_rank, ranks, small(tmp_path / "more", **given))
    assert_same_run(tmp_path / "one", tmp_path / "more")


@pytest.mark.xdist_group("gloo")
def test_a_run_continues_on_another_number_of_ranks_bit_for_bit(tmp_path: Path) -> None:
    train(small(tmp_path / "whole"))
    run_ranks(train_rank, 2, small(tmp_path / "cut", save_every=3, stage=2))
    train(small(tmp_path / "rest", resume=tmp_path / "cut" / "step-000003", stage=3))
    assert_same_run(tmp_path / "whole", tmp_path / "rest")


def test_a_changed_course_goes_on_with_the_next_batch_of_another_order(tmp_path: Path) -> None:
    train(small(tmp_path, steps=2))
    train(small(tmp_path, resume=tmp_path, steps=3, global_batch=16))
    saved = read_facts(find_checkpoint(tmp_path))["order"]
    assert (saved["position"], saved["batch_size"]) == (3, 2)


@pytest.mark.xdist_group("gloo")
def test_more_ranks_than_logical_ranks_are_refused(tmp_path: Path) -> None:
    for kind, message in run_ranks(train_rank, 2, small(tmp_path, logical_ranks=1), raises=True):
        assert kind == "LayoutError"
        assert "logical_ranks=1, and there are 2 ranks." in message


@pytest.mark.xdist_group("gloo")
def test_a_signal_to_one_rank_ends_all_of_them_at_one_step(tmp_path: Path) -> None:
    got = run_ranks(stop_one_rank, 2, small(tmp_path, stage=3))
    assert got == [0, signal.SIGTERM]
    assert find_checkpoint(tmp_path).name == "step-000003"


@pytest.mark.xdist_group("gloo")
def test_ranks_with_other_options_are_refused(tmp_path: Path) -> None:
    for kind, message in run_ranks(differ_by_rank, 2, small(tmp_path), raises=True):
        assert kind == "MismatchError"
        assert "disagree about the options and the text" in message
        assert "'lr': 0.1" in message and "'lr': 1.1" in message
