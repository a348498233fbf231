"""A recording that is not what was saved is refused, by one error: no rank is blamed for it."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError
from fzero.errors import LayoutError
from tests.tools.record.runs import batch

HEAD = "recording.json"
SHARDED = fzero.shard(
    lambda state, x: (
        fzero.apply_gradients(
            fzero.grad_and_reduce(lambda p, x: (x["rows"] @ p["w"]).square().sum(), state)(x)[0]
        ),
        None,
    ),
    stage=2,
)


def init(step: Any) -> Any:
    return step.init({"w": torch.ones(3, 2)}, fzero.optim.adamw(0.1))


def record(calls: int = 3) -> fzero.tools.Recording:
    step = fzero.record(fzero.simulate(SHARDED, world_size=2), every=2, keep=None)
    state = init(step)
    for number in range(calls):
        rows = batch(number).float()
        state, _ = step(state, {"rows": rows, "name": "a", "more": (1, [2.5, None])})
    return step.recording


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    record().save(folder)
    assert bisected(folder) is None
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def bisected(folder: Path) -> Any:
    return fzero.bisect(fzero.load_recording(folder), SHARDED, init=init)


def body_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / HEAD).read_text())["recording"]


def data_of(folder: Path) -> Path:
    return folder / body_of(folder)["data"]


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        fzero.load_recording(folder)
    assert "Fix: " in str(caught.value)


# Damage.


@pytest.mark.parametrize("change", ["flip", "cut", "remove", "link"])
def test_a_file_that_is_another_one_is_refused(change: str, run: Path, tmp_path: Path) -> None:
    files = sorted(x for x in run.rglob("*") if x.is_file() and x.name != ".lock")
    assert len(files) >= 8
    for file in files:
        data = file.read_bytes()
        if change == "flip":
            middle = len(data) // 2
            file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        elif change == "cut":
            file.write_bytes(data[:-1])
        else:
            file.unlink()
        if change == "link" and file.name != HEAD:
            (tmp_path / "elsewhere").write_bytes(data)
            file.symlink_to(tmp_path / "elsewhere")
        refused(run, ".")
        file.unlink(missing_ok=True)
        file.write_bytes(data)
    assert bisected(run) is None


def test_files_that_changed_places_are_refused(run: Path) -> None:
    data = data_of(run)
    pairs = [
        (data / "state-00000000" / "checkpoint.json", data / "state-00000002" / "checkpoint.json"),
        (data / "state-00000000", data / "state-00000002"),
    ]

    def swap(a: Path, b: Path) -> None:
        a.rename(data / "aside")
        b.rename(a)
        (data / "aside").rename(b)

    for a, b in pairs:
        swap(a, b)
        refused(run, "checksum is wrong|bytes")
        swap(a, b)
    assert bisected(run) is None


@pytest.mark.parametrize("text", ["", "7", "null", "[" * 10**5, '{"calls": ' * 10**5, "\xff"])
def test_other_texts_are_refused(text: str, run: Path) -> None:
    (run / HEAD).write_bytes(text.encode("latin-1"))
    refused(run, f"{HEAD} is no manifest")


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, f"there is no recording at .*: no {HEAD}")
    refused(tmp_path / "elsewhere", "there is no recording")
    for version in (1, 2, 4, None):
        body = {} if version is None else {"format": version}
        crc = zlib.crc32(json.dumps(body).encode())
        (tmp_path / HEAD).write_text(json.dumps({"crc32": crc, "recording": body}))
        refused(tmp_path, f"has format {version}, another format than 3")
    (tmp_path / HEAD).unlink()
    (tmp_path / HEAD).mkdir()
    refused(tmp_path, "is a folder, and no file")


# A save that is cut off.


def test_a_save_that_was_cut_off_leaves_the_one_before(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it ends: without a word, as a process that was killed, or with an error."""
    from fzero.tools.record import files

    for name in ("make_folder", "write_draft", "sync_files", "digest_of_file", "put_sealed"):
        for error in (KeyboardInterrupt, CheckpointError if name == "write_draft" else OSError):
            with monkeypatch.context() as patched:

                def fails(*args: Any, error: Any = error, **kwargs: Any) -> Any:
                    raise error("cut off", cause="", fix="") if error is CheckpointError else error

                patched.setattr(files if name == "write_draft" else files.folders, name, fails)
                with pytest.raises((KeyboardInterrupt, CheckpointError)):
                    record(2).save(run)
            assert fzero.load_recording(run).updates == 3
    assert bisected(run) is None
    record(2).save(run)
    assert fzero.load_recording(run).updates == 2 and bisected(run) is None
    assert sorted(x.name for x in run.iterdir()) == [".lock", data_of(run).name, HEAD]


def test_a_checkpoint_beside_a_recording_stays(tmp_path: Path) -> None:
    recording, state = record(1), fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=0)
    for _ in range(2):
        fzero.checkpoint.save(tmp_path, state)
        recording.save(tmp_path)
    fzero.checkpoint.load(tmp_path, state)
    assert bisected(tmp_path) is None


def test_a_loaded_recording_is_saved_elsewhere(run: Path, tmp_path: Path) -> None:
    loaded = fzero.load_recording(run)
    with pytest.raises(LayoutError, match=r"this recording was loaded from .*run"):
        loaded.save(run)
    loaded.save(tmp_path / "other")
    shutil.rmtree(run)
    assert bisected(tmp_path / "other") is None


def test_inputs_whose_names_are_alike_stay_apart(tmp_path: Path) -> None:
    step = fzero.record(fzero.shard(lambda state, x: (state, None), stage=0), every=1)
    x = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(3)}
    step(step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5)), x)
    step.recording.save(tmp_path)
    ((found,), _), *_ = fzero.load_recording(tmp_path).calls[0].inputs
    assert torch.equal(found["a"]["b"], x["a"]["b"]) and torch.equal(found["a.b"], x["a.b"])
