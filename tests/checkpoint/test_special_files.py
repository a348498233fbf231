"""What is no regular file in the place of one that a checkpoint reads or writes: an error, no hang.

An open of a FIFO waits for its other end, a read of /dev/zero never ends. Nothing here may do so.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import (
    CheckpointError,
    export_safetensors,
    import_safetensors,
    load,
    load_universal,
    read_extra,
    safetensors_initializer,
    save,
    save_universal,
)
from fzero.errors import LayoutError
from tests.covering import covered
from tests.strategies import same

PARAMS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}


def made() -> Any:
    return fzero.init({k: v.clone() for k, v in PARAMS.items()}, fzero.optim.adamw(0.1), stage=2)


def _socket(file: Path) -> None:
    before = os.getcwd()
    os.chdir(file.parent)  # an address has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(before)


def _link_to_fifo(file: Path) -> None:
    elsewhere = file.with_name(f"{file.name}.elsewhere")
    os.mkfifo(elsewhere)
    file.symlink_to(elsewhere)


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fifo": (os.mkfifo, "is a FIFO"),
    "socket": (_socket, "is a socket"),
    "device": (lambda file: file.symlink_to("/dev/zero"), "is a (device|link)"),
    "folder": (Path.mkdir, "is a folder"),
    "link": (_link_to_fifo, "is a (FIFO|link)"),
}


def put(file: Path, kind: str) -> str:
    """Put something else in the place of a file; return what the error says of it."""
    file.unlink(missing_ok=True)
    make, seen = KINDS[kind]
    make(file)
    return rf"damaged: .*{file.name} {seen}"


@contextmanager
def in_time(seconds: float = 30) -> Iterator[None]:
    """Fail if the block hangs: an alarm ends a system call that waits."""

    def ring(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(call: Callable[[], Any], match: str) -> None:
    with in_time(), pytest.raises(CheckpointError, match=match):
        call()


def a_file(folder: Path, end: str) -> Path:
    return next(file for file in sorted(folder.rglob("*")) if file.name.endswith(end))


@covered(kind=[*KINDS], end=["checkpoint.json", ".lock", ".distcp", "rng-00000.json"])
def test_in_the_place_of_a_file_of_a_checkpoint(end: str, kind: str, tmp_path: Path) -> None:
    state = made()
    save(tmp_path, state, extra={"epoch": 1})
    seen = put(a_file(tmp_path, end), kind)
    refused(lambda: load(tmp_path, made()), seen)
    same(fzero.full_params(state), PARAMS)
    if end == "checkpoint.json":
        refused(lambda: read_extra(tmp_path), seen)
    if end in ("checkpoint.json", ".lock"):
        before = sorted(tmp_path.rglob("*"))
        refused(lambda: save(tmp_path, state), seen)
        assert sorted(tmp_path.rglob("*")) == before  # nothing was written, or taken away
    else:
        with in_time():
            save(tmp_path, state)  # into a folder of its own
            load(tmp_path, made())


def test_in_the_place_of_the_folders_of_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, made())
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    folder.rename(tmp_path / "away")
    os.mkfifo(folder)
    refused(lambda: load(tmp_path, made()), r"damaged: .*data-\w+ is no folder")
    os.mkfifo(tmp_path / "fifo")
    refused(lambda: load(tmp_path / "fifo", made()), "there is no checkpoint at")
    refused(lambda: save(tmp_path / "fifo", made()), "could not make")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "end", ["latest_universal", "w/fp32.pt", "w/exp_avg.pt", "b/step.pt", "optimizer_state.pt"]
)
def test_in_the_place_of_a_file_of_a_universal_checkpoint(
    end: str, kind: str, tmp_path: Path
) -> None:
    save_universal(tmp_path, made(), tag="one")
    file = tmp_path / end if end == "latest_universal" else tmp_path / "one" / "zero" / end
    assert file.is_file()
    seen = put(file, kind)
    refused(lambda: load_universal(tmp_path, made()), seen)
    if end == "latest_universal":
        before = sorted(tmp_path.rglob("*"))
        refused(lambda: save_universal(tmp_path, made(), tag="two"), seen)
        assert sorted(tmp_path.rglob("*")) == before


@covered(kind=[*KINDS], end=["model.safetensors.index.json", "00001-of-00002.safetensors"])
def test_in_the_place_of_a_file_of_safetensors(end: str, kind: str, tmp_path: Path) -> None:
    export_safetensors(tmp_path, made(), max_shard_bytes=30)
    seen = put(a_file(tmp_path, end), kind)
    refused(lambda: import_safetensors(tmp_path, made()), seen)
    refused(lambda: safetensors_initializer(tmp_path), seen)
    before = sorted(tmp_path.rglob("*"))
    refused(lambda: export_safetensors(tmp_path, made(), max_shard_bytes=30), seen)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_to_a_file_of_safetensors_is_followed_as_the_cache_of_the_hub_has_it(
    tmp_path: Path,
) -> None:
    export_safetensors(tmp_path / "blobs", made(), max_shard_bytes=30)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    state = fzero.init({k: 0 * v for k, v in PARAMS.items()}, fzero.optim.sgd(0.1), stage=0)
    same(fzero.full_params(import_safetensors(tmp_path / "snapshot", state)), PARAMS)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_in_the_place_of_deepspeeds_latest_beside_its_tags(kind: str, tmp_path: Path) -> None:
    seen = put(tmp_path / "latest", kind)
    engine = fzero.adapter.initialize(
        model=torch.nn.Linear(2, 2),
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}},
    )
    refused(lambda: engine.load_checkpoint(tmp_path), seen)
    refused(lambda: engine.save_checkpoint(tmp_path, tag="one"), seen)
    engine.close()


def test_what_is_no_path_is_an_error_of_its_own(tmp_path: Path) -> None:
    state = made()
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "load": load,
        "save": save,
        "load_universal": load_universal,
        "save_universal": save_universal,
        "import_safetensors": import_safetensors,
        "export_safetensors": export_safetensors,
        "read_extra": lambda path, _: read_extra(path),
        "safetensors_initializer": lambda path, _: safetensors_initializer(path),
    }
    for name, call in calls.items():
        for path, seen in (
            (None, "is a NoneType"),
            ("", "is empty"),
            (3, "is a int"),
            (state, "is a TrainState"),
            (b"run", "is a bytes"),
        ):
            match = rf"{name}: the path {seen}\.\nUsual cause: (.*)\nFix: fzero.checkpoint.{name}\("
            with pytest.raises(LayoutError, match=match):
                call(path, state)
