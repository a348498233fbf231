"""Programs that save to one path at once, and others that read there: each finds a whole one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fzero
from fzero.checkpoint import load, save
from fzero.checkpoint._folders import kept
from tests.checkpoint.forge import data_of

RULE = fzero.optim.sgd(0.5, momentum=0.5)

WRITER = """
import sys, torch, fzero
from fzero.checkpoint import save
torch.set_num_threads(1)
path, mark, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
state = fzero.init({"w": torch.full((1000,), mark)}, fzero.optim.sgd(0.5, momentum=0.5), stage=0)
for number in range(count):
    save(path, state, extra={"mark": mark, "number": number})
"""


def _start(path: Path, mark: float, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(path), str(mark), str(count)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _state(numel: int = 1000) -> fzero.TrainState:
    return fzero.init({"w": torch.zeros(numel)}, RULE, stage=0)


def _read(path: Path) -> float:
    loaded, extra = fzero.checkpoint.load_with_extra(path, _state(), rng=False)
    values = fzero.full_params(loaded)["w"]
    assert torch.equal(values, torch.full((1000,), extra["mark"]))  # of one save, all of it
    return extra["mark"]


def test_who_reads_finds_a_whole_one_while_two_write(tmp_path: Path) -> None:
    writers = [_start(tmp_path, mark, 40) for mark in (1.0, 2.0)]
    seen: list[float] = []
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "checkpoint.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        while any(writer.poll() is None for writer in writers):
            seen.append(_read(tmp_path))
        assert [writer.wait(100) for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    assert len(seen) > 5
    assert _read(tmp_path) in (1.0, 2.0)
    save(tmp_path, _state())
    assert [folder.name for folder in tmp_path.glob("data-*")] == [data_of(tmp_path).name]


def test_a_folder_that_somebody_reads_stays_until_he_is_done(tmp_path: Path) -> None:
    save(tmp_path, _state())
    old = data_of(tmp_path)
    with kept(tmp_path):
        save(tmp_path, _state())
        assert old.is_dir() and sorted(old.iterdir())
    save(tmp_path, _state())
    assert [folder.name for folder in tmp_path.glob("data-*")] == [data_of(tmp_path).name]


def test_a_save_never_removes_one_that_became_the_checkpoint_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save comes between any two file operations of the end of this one."""
    save(tmp_path, _state())
    real, inside = os.replace, []

    def replace(*args: object) -> None:
        real(*args)  # type: ignore
        if not inside:
            inside.append(1)
            save(tmp_path, _state(), extra={"which": "other"})

    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, _state(), extra={"which": "mine"})
    load(tmp_path, _state())
    assert fzero.checkpoint.read_extra(tmp_path) == {"which": "other"}
    assert len(list(tmp_path.glob("data-*"))) == 1


def test_a_copy_without_the_lock_is_read(tmp_path: Path) -> None:
    save(tmp_path, _state())
    (tmp_path / ".lock").unlink()
    load(tmp_path, _state())
    assert not (tmp_path / ".lock").exists()
