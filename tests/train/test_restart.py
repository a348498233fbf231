"""A rank is killed and torchrun starts all of them again: the losses are those of a whole run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from fzero.checkpoint import CheckpointError
from fzero.errors import LayoutError
from tests.covering import covered
from tests.ranks import run_ranks, spawn_script
from tests.train.runs import ARGS, saved_losses, small
from train.claim import begun_before, claimed
from train.train import train

TIER_INPUTS = ("examples/train",)  # tests/tiers.py: a push that changes them runs these tests

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import os, signal, sys
sys.path.insert(0, @EXAMPLES@)
from train import train as module
from train.command import main

real = module.make_batches
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def make_batches(job, order):
    if first and order.position == @STEP@ and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(job, order)

module.make_batches = make_batches
os.chdir(os.path.dirname(__file__))
sys.exit(main(sys.argv[1:]))
"""

OPTIONS = [*ARGS, "--steps", "6", "--save-every", "3", "--stage", "3"]


def _whole(rank: int, size: int, out: Path) -> None:
    train(small(out, stage=3))


@pytest.mark.slow
@pytest.mark.timeout(600)  # two starts of two ranks: 15 s, and many times that on a busy machine
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("mirror", "killed_at", "goes_on"),
    [
        pytest.param([], 4, "resumed runs/gpt-002/step-000003", id="disk"),
        pytest.param(["--mirror", "2"], 5, "restored step 4 from memory", id="memory"),
    ],
)
def test_a_killed_rank_is_restarted_and_the_losses_are_the_same(
    mirror: list[str], killed_at: int, goes_on: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    text = SCRIPT.replace("@EXAMPLES@", repr(str(EXAMPLES)))
    script.write_text(text.replace("@STEP@", str(killed_at)))
    (tmp_path / "runs" / "gpt-001").mkdir(parents=True)  # of a run before
    args = [*OPTIONS, *mirror]  # without --out: the ranks find the folder that they had made
    done = spawn_script(script, 2, args, timeout_s=400, options=["--max-restarts=1"])
    assert done.returncode == 0, done.stderr
    assert goes_on in done.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert "2 rank(s)" in done.stdout
    assert done.stdout.count("validation loss") == 1  # rank 0 alone speaks
    run_ranks(_whole, 2, tmp_path / "whole")
    assert len(saved_losses(tmp_path / "whole")) == 6
    assert saved_losses(tmp_path / "runs" / "gpt-002") == saved_losses(tmp_path / "whole")


def test_only_the_launch_that_began_a_run_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    mine = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}
    for folder in (other, own):
        folder.mkdir()
    (other / "run").write_text("of another launch")
    assert begun_before([other, own], mine) is None  # nobody has begun one
    with claimed(own, mine):
        assert begun_before([other, own], mine) == own
        assert begun_before([other, own], {**mine, "TORCHELASTIC_RESTART_COUNT": "0"}) is None
        assert begun_before([other, own], {**mine, "TORCHELASTIC_RUN_ID": "b"}) is None
        assert begun_before([other, own], {}) is None
    assert begun_before([other, own], mine) == own
    another = os.getppid() + 1  # agent of the same id
    monkeypatch.setattr(os, "getppid", lambda: another)
    assert begun_before([other, own], mine) is None


@covered(name=["latest", "run"], kind=["fifo", "folder"])
def test_what_is_no_file_in_the_place_of_one_is_refused_and_not_waited_for(
    kind: str, name: str, tmp_path: Path
) -> None:
    (os.mkfifo if kind == "fifo" else os.mkdir)(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is no file\..*\n.*\nFix: remove {name}"):
        if name == "run":
            train(small(tmp_path))
        else:
            train({"resume": tmp_path})


def _second(rank: int, size: int, out: Path) -> None:
    train(small(out, overwrite=True))


@pytest.mark.xdist_group("gloo")
def test_a_folder_that_another_program_trains_into_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "run").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LayoutError, match=r"is in use: another program.*\n.*\nFix: give"):
            train(small(tmp_path))
        for kind, message in run_ranks(_second, 2, tmp_path, raises=True):
            assert kind == "LayoutError" and "is in use" in message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert train(small(tmp_path, steps=1)) == 0
