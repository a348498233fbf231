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
from fzero.checkpoint import CheckpointError, _storage, load, read_extra, save
from fzero.checkpoint.collective import Ranks
from fzero.errors import LostRankError
from tests.checkpoint.states import blank, contents, make, mixed, snapshot
from tests.ranks import run_ranks
from tests.strategies import same

Target = tuple[Any, str]  # what is replaced: an attribute of an object
TORCH_SAVE: Target = (torch, "save")  # in the middle of the data of a universal checkpoint
PACKED: Target = (_storage, "packed")  # in the middle of the data
FSYNC: Target = (os, "fsync")  # at the end of each file; the last is the manifest
REPLACE: Target = (os, "replace")  # the manifest, complete, is about to become the checkpoint


def failing(target: Target, after: int, error: BaseException) -> Any:
    """Let a function raise `error`, but for the first `after` calls."""
    effects = [*[mock.DEFAULT] * after, *[error] * 100]
    return mock.patch.object(*target, wraps=getattr(*target), side_effect=effects)


MOMENTS = [(PACKED, 0), (PACKED, 5), *((FSYNC, n) for n in range(5)), (REPLACE, 0)]
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
    target: Target, after: int, error: BaseException, expected: type[BaseException], tmp_path: Path
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
    fails = failing(PACKED, 3, OSError("disk is full"))
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
save, load = (getattr(fzero.checkpoint, name) for name in sys.argv[2:])
torch.set_num_threads(1)
def state(value):
    return fzero.init({"w": torch.full((9,), value)}, fzero.optim.sgd(1.0), stage=0)
def dying(real):
    def call(*args, **kwargs):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **kwargs)
    return call
save(sys.argv[1], state(0.0))
killed = 0
while True:  # at each time that something reaches the disk
    child = os.fork()
    if not child:
        left = killed
        os.fsync, os.rename, os.replace = map(dying, (os.fsync, os.rename, os.replace))
        save(sys.argv[1], state(1.0))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    value = set(load(sys.argv[1], state(2.0)).params.flats[0][:9].tolist())
    assert value in ({0.0}, {1.0}) and (status or value == {1.0}), (killed, value)
    print(killed, *value)
    if not status:
        break
    killed += 1
"""


@pytest.mark.parametrize(
    ("names", "first"), [(("save", "load"), 4), (("save_universal", "load_universal"), 8)]
)
def test_a_process_that_is_killed_leaves_the_old_checkpoint(
    names: tuple[str, str], first: int, tmp_path: Path
) -> None:
    """Until the last of its files is on the disk; from then on the new one is there."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), *names]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = [float(line.split()[1]) for line in ended.stdout.splitlines()]
    assert found == sorted(found) and found[:first] == [0.0] * first and found[-1] == 1.0
    if names[0] == "save":
        state = fzero.init({"w": torch.zeros(9)}, fzero.optim.sgd(1.0), stage=3)
        save(tmp_path, load(tmp_path, state))
        assert len(list(tmp_path.glob("data-*"))) == 1  # what was begun is taken away


def _one_rank_fails(rank: int, size: int, folder: Path, target: str, loser: int) -> str:
    old, new = make(mixed(seed=1), stage=3), make(mixed(seed=2), stage=3)
    save(folder, old)
    where = {"save": PACKED, "replace": REPLACE}[target]
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


@pytest.mark.parametrize(
    ("lost", "late", "raises"),
    [
        ([1], True, CheckpointError),
        ([], False, CheckpointError),
        ([1], False, LostRankError),
    ],
)
def test_a_disk_that_is_slower_than_the_timeout_is_no_lost_rank(
    lost: list[int],
    late: bool,
    raises: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(1.0), stage=0)
    save(tmp_path, state)
    tell, told = Ranks.tell, list[object]()

    def fails(ranks: Ranks, value: object) -> list[object]:
        told.append(value)
        if len(told) > 5:  # the first outcome of what is written
            raise LostRankError("a timeout", cause="x", fix="y", ranks=lost, late=late)
        return tell(ranks, value)

    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "tell", fails)
        with pytest.raises(raises, match="within the timeout" if late or not lost else "a timeout"):
            save(tmp_path, state)
    load(tmp_path, state)
