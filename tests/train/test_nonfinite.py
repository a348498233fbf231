"""The job names the step, the rank and the parameter of a NaN, and ends on every rank alike."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from fzero.data import Order
from tests.ranks import run_ranks
from tests.train.runs import ARGS, saved_losses
from train import step as of_step
from train import train as of_train
from train.command import main
from train.saving import find_checkpoint
from train.step import byte_losses, make_batches
from train.train import train

SMALL = [*ARGS, "--steps", "4", "--logical-ranks", "4", "--quiet"]


def _bad_losses(what: str, path: str) -> Any:
    """Losses of which one is NaN; or finite ones, with a gradient of `path` that is 0 / 0."""

    def losses(apply: Any, params: Any, batch: Tensor) -> Tensor:
        found = byte_losses(apply, params, batch)
        if what == "loss":
            return found * float("nan")
        return found + (params[path] * 0).abs().sqrt().sum()

    return losses


def _train(rank: int, size: int, args: list[str], what: str, path: str) -> tuple[int, str]:
    """Run the command; at its fourth step rank 1 has the fault. Its exit code, and what it says."""
    told = io.StringIO()
    with ExitStack() as stack:

        def batches(job: Any, order: Order) -> Any:
            if order.position == 3 and rank == 1:
                bad = _bad_losses(what, path)
                stack.enter_context(mock.patch.object(of_step, "byte_losses", bad))
            return make_batches(job, order)

        stack.enter_context(mock.patch.object(of_train, "make_batches", batches))
        stack.enter_context(redirect_stderr(told))
        return main([*SMALL, *args]), told.getvalue()


def _finish(rank: int, size: int, out: Path) -> int:
    return train({"resume": out, "plot": False, "sample_bytes": 0, "quiet": True})


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("what", "options", "backward"),
    [
        ("loss", ["--stage", "0", "--micro-batches", "2"], 1),
        ("gradient", ["--stage", "3", "--accumulate", "2"], 1),
    ],
)
def test_it_ends_with_a_report_and_goes_on_from_the_last_checkpoint(
    tmp_path: Path, what: str, options: list[str], backward: int
) -> None:
    path = "blocks.0.up.weight" if what == "gradient" else ""
    args = [*options, "--save-every", "2", "--out", str(tmp_path)]
    told = run_ranks(_train, 2, args, what, path)
    assert [code for code, _ in told] == [2, 2]
    (report,) = {text.split(": ", 1)[1] for _, text in told}
    head = f"after 3 updates, in backward {backward} since the last one: "
    if what == "loss":
        assert report.startswith(f"{head}the loss of rank 1 is NaN or infinite; so is the gradient")
    else:
        assert report.startswith(
            f"{head}rank 1 has a NaN or an infinity in the gradient of {path},"
        )
    assert find_checkpoint(tmp_path).name == "step-000002"
    assert run_ranks(_finish, 2, tmp_path) == [0, 0]
    assert len(saved_losses(tmp_path)) == 4
