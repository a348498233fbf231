"""A save that fails, anywhere, leaves the checkpoint that was there before, and the state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, load, read_extra, save
from tests.checkpoint.states import ADAM, blank, contents, equal, make, mixed, snapshot, unchanged
from tests.ranks import run_ranks

Target = tuple[Any, str]  # what is replaced: an attribute of an object
TORCH_SAVE: Target = (torch, "save")  # in the middle of the data
FSYNC: Target = (os, "fsync")  # at the end of a file of data, of the index, of the manifest
REPLACE: Target = (os, "replace")  # the manifest, complete, is about to become the checkpoint


def _failing(target: Target, after: int, error: BaseException) -> Callable[..., Any]:
    real, calls = getattr(*target), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > after:
            raise error
        return real(*args, **kwargs)

    return fails


MOMENTS = [(TORCH_SAVE, 0), (TORCH_SAVE, 5), *((FSYNC, n) for n in range(3)), (REPLACE, 0)]
ERRORS = [OSError("disk is full"), KeyboardInterrupt("stop"), ValueError("odd")]


@pytest.mark.parametrize(("target", "after"), MOMENTS)
@pytest.mark.parametrize("error", ERRORS)
def test_a_save_that_fails_leaves_the_old_checkpoint(
    target: Target,
    after: int,
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = make(mixed(seed=1), stage=2, ranks=0), make(mixed(seed=2), stage=2, ranks=0)
    save(tmp_path, old, extra={"which": "old"})
    there = sorted(tmp_path.iterdir())
    before = snapshot(new)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    with monkeypatch.context() as patch:
        patch.setattr(*target, _failing(target, after, error))
        with pytest.raises(expected, match=str(error)):
            save(tmp_path, new, extra={"which": "new"})
    unchanged(new, before)
    assert set(there) <= set(tmp_path.iterdir()) <= {*there, tmp_path / "checkpoint.json.partial"}
    assert read_extra(tmp_path) == {"which": "old"}
    equal(contents(load(tmp_path, make(blank(mixed()), stage=0, ranks=0))), contents(old))
    save(tmp_path, new, extra={"which": "new"})
    assert len(list(tmp_path.glob("data-*"))) == 1
    equal(contents(load(tmp_path, make(blank(mixed()), stage=0, ranks=0))), contents(new))


def test_a_first_save_that_fails_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make(mixed(), stage=0, ranks=0)
    with monkeypatch.context() as patch:
        patch.setattr(*TORCH_SAVE, _failing(TORCH_SAVE, 3, OSError("disk is full")))
        with pytest.raises(CheckpointError, match=r"could not write .*: OSError: disk is full"):
            save(tmp_path / "new", state)
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(CheckpointError, match="a save that was cut off"):
        load(tmp_path / "new", state)


def test_a_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not make .*file/x.*NotADirectory"):
        save(tmp_path / "file" / "x", make(mixed(), stage=0, ranks=0))


def test_other_files_at_the_path_stay(tmp_path: Path) -> None:
    (tmp_path / "data-mine").mkdir()
    (tmp_path / "notes.txt").write_text("reshard")
    for _ in range(2):
        save(tmp_path, make(mixed(), stage=0, ranks=0))
    assert (tmp_path / "notes.txt").read_text() == "reshard"
    assert (tmp_path / "data-mine").is_dir()


KILLED = """
import os, signal, sys, torch, fzero
from fzero.checkpoint import save
torch.set_num_threads(1)
save(sys.argv[1], fzero.init({"w": torch.ones(9)}, fzero.optim.sgd(1.0), stage=0))
real, calls = os.fsync, []
def fsync(file):
    calls.append(file)
    if len(calls) == 3:  # after the data and the index: the manifest
        os.kill(os.getpid(), signal.SIGKILL)
    real(file)
os.fsync = fsync
save(sys.argv[1], fzero.init({"w": torch.zeros(9)}, fzero.optim.sgd(1.0), stage=0))
"""


def test_a_process_that_is_killed_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, timeout=60).returncode == -9
    assert len(list(tmp_path.glob("data-*"))) == 2  # the old one, and what was begun
    optimizer = fzero.optim.sgd(1.0)
    loaded = load(tmp_path, fzero.init({"w": torch.zeros(9)}, optimizer, stage=3))
    assert torch.equal(fzero.full_params(loaded)["w"], torch.ones(9))
    save(tmp_path, loaded)
    assert len(list(tmp_path.glob("data-*"))) == 1


def _one_rank_fails(rank: int, size: int, folder: Path, target: str, loser: int) -> Any:
    old, new = (fzero.init(mixed(seed=seed), ADAM, stage=3) for seed in (1, 2))
    save(folder, old)
    there = sorted(folder.iterdir())
    where = {"save": TORCH_SAVE, "replace": REPLACE}[target]
    before = snapshot(new)
    message = "nothing was raised"
    with pytest.MonkeyPatch.context() as patch:
        if rank == loser:
            patch.setattr(*where, _failing(where, 0, OSError("disk is full")))
        try:
            save(folder, new)
        except CheckpointError as error:
            message = "".join([str(error), *error.__notes__])
    unchanged(new, before)
    loaded = load(folder, fzero.init(blank(mixed()), ADAM, stage=1))
    equal(contents(loaded), contents(old))
    save(folder, new)  # nobody is out of step
    loaded = load(folder, fzero.init(blank(mixed()), ADAM, stage=1))
    equal(contents(loaded), contents(new))
    return message, len(there)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("target", "loser"), [("save", 1), ("replace", 0)])
def test_when_one_rank_fails_all_raise_and_the_old_one_stays(
    target: str, loser: int, tmp_path: Path
) -> None:
    for message, _ in run_ranks(_one_rank_fails, 2, tmp_path, target, loser):
        assert "disk is full" in message
        assert f"(raised on rank {loser} of 2)" in message
