"""Programs that save to one path at once, and others that read there: each finds a whole one."""

from __future__ import annotations

import itertools
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

import fzero
from fzero.checkpoint import load, save
from fzero.checkpoint.folders import kept
from tests.checkpoint.forge import data_of
from tests.ranks import forkserver

RULE = fzero.optim.sgd(0.5, momentum=0.5)


def _write(path: Path, mark: float, stop: Path) -> None:
    torch.set_num_threads(1)
    state = fzero.init({"w": torch.full((1000,), mark)}, RULE, stage=0)
    for number in itertools.count():
        save(path, state, extra={"mark": mark, "number": number})
        if stop.exists():
            break


def _start(path: Path, mark: float, stop: Path) -> BaseProcess:
    process = forkserver().Process(target=_write, args=(path, mark, stop), daemon=True)
    process.start()
    return process


def _state(numel: int = 1000) -> fzero.TrainState:
    return fzero.init({"w": torch.zeros(numel)}, RULE, stage=0)


def _read(path: Path) -> float:
    loaded, extra = fzero.checkpoint.load_with_extra(path, _state(), rng=False)
    values = fzero.full_params(loaded)["w"]
    assert torch.equal(values, torch.full((1000,), extra["mark"]))  # of one save, all of it
    return extra["mark"]


def test_who_reads_finds_a_whole_one_while_two_write(tmp_path: Path) -> None:
    folder, stop = tmp_path / "saved", tmp_path / "stop"
    writers = [_start(folder, mark, stop) for mark in (1.0, 2.0)]
    try:
        deadline = time.monotonic() + 100
        while not (folder / "checkpoint.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(10):
            _read(folder)
        assert all(writer.is_alive() for writer in writers)
        stop.touch()
        for writer in writers:
            writer.join(100)
        assert [writer.exitcode for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    assert _read(folder) in (1.0, 2.0)
    save(folder, _state())
    assert [data.name for data in folder.glob("data-*")] == [data_of(folder).name]


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
