"""A save that fails, anywhere, leaves the checkpoint that was there before, and the state."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, load, read_extra, save
from tests.checkpoint.states import blank, contents, make, mixed, snapshot
from tests.ranks import run_ranks
from tests.strategies import same

Target = tuple[Any, str]  # what is replaced: an attribute of an object
TORCH_SAVE: Target = (torch, "save")  # in the middle of the data
FSYNC: Target = (os, "fsync")  # at the end of each file; the last is the manifest
REPLACE: Target = (os, "replace")  # the manifest, complete, is about to become the checkpoint


def failing(target: Target, after: int, error: BaseException) -> Any:
    """Let a function raise `error`, but for the first `after` calls."""
    effects = [*[mock.DEFAULT] * after, *[error] * 100]
    return mock.patch.object(*target, wraps=getattr(*target), side_effect=effects)


MOMENTS = [(TORCH_SAVE, 0), (TORCH_SAVE, 5), *((FSYNC, n) for n in range(5)), (REPLACE, 0)]
ERRORS = [
    (OSError("disk is full"), CheckpointError),
    (KeyboardInterrupt("stop"), KeyboardInterrupt),
]


def require_here(folder: Path, state: Any) -> None:
    """Assert that the checkpoint in `folder` is that of `state`."""
    same(contents(load(folder, make(blank(mixed()), stage=0))), contents(state))


@pytest.mark.parametrize(("target", "after"), MOMENTS)
@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_a_save_that_fails_leaves_the_old_checkpoint(
    target: Target,
    after: int,
    error: BaseException,
    expected: type[BaseException],
    tmp_path: Path,
) -> None:
    old, new = make(mixed(seed=1), stage=2), make(mixed(seed=2), stage=2)
    save(tmp_path, old, extra={"which": "old"})
    there = sorted(tmp_path.iterdir())
    before = snapshot(new)
    with failing(target, after, error), pytest.raises(expected, match=str(error)):
        save(tmp_path, new, extra={"which": "new"})
    same(new, before)
    assert set(there) <= set(tmp_path.iterdir()) <= {*there, tmp_path / "checkpoint.json.partial"}
    assert read_extra(tmp_path) == {"which": "old"}
    require_here(tmp_path, old)
    save(tmp_path, new, extra={"which": "new"})
    assert len(list(tmp_path.glob("data-*"))) == 1
    require_here(tmp_path, new)


def test_a_first_save_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    state, message = make(mixed(), stage=0), r"could not write .*: OSError: disk is full"
    fails = failing(TORCH_SAVE, 3, OSError("disk is full"))
    with fails, pytest.raises(CheckpointError, match=message):
        save(tmp_path / "new", state)
    assert [file.name for file in (tmp_path / "new").iterdir()] == [".lock"]
    with pytest.raises(CheckpointError, match="a save that was cut off"):
        load(tmp_path / "new", state)


def test_other_files_at_the_path_stay(tmp_path: Path) -> None:
    (tmp_path / "data-mine").mkdir()
    (tmp_path / "notes.txt").write_text("reshard")
    for _ in range(2):
        save(tmp_path, make(mixed(), stage=0))
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
    if len(calls) == 5:  # after all that it names: the manifest
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


def _one_rank_fails(rank: int, size: int, folder: Path, target: str, loser: int) -> str:
    old, new = make(mixed(seed=1), stage=3), make(mixed(seed=2), stage=3)
    save(folder, old)
    where = {"save": TORCH_SAVE, "replace": REPLACE}[target]
    before = snapshot(new)
    fails = failing(where, 0, OSError("disk is full")) if rank == loser else nullcontext()
    with fails, pytest.raises(CheckpointError) as raised:
        save(folder, new)
    same(new, before)
    require_here(folder, old)
    save(folder, new)  # nobody is out of step
    require_here(folder, new)
    return "".join([str(raised.value), *raised.value.__notes__])


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("target", "loser"), [("save", 1), ("replace", 0)])
def test_when_one_rank_fails_all_raise_and_the_old_one_stays(
    target: str, loser: int, tmp_path: Path
) -> None:
    for message in run_ranks(_one_rank_fails, 2, tmp_path, target, loser):
        assert "disk is full" in message
        assert f"(raised on rank {loser} of 2)" in message
