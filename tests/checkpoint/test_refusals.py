"""What `save` and `load` refuse, with which words, and that they leave everything as it was."""

from __future__ import annotations

import json
import re
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, load, load_with_extra, read_extra, save
from fzero.errors import AxisError, DonatedError, FzeroError, LayoutError, PhaseError
from tests.checkpoint.states import make, mixed, snapshot, train
from tests.covering import covered
from tests.ranks import run_ranks
from tests.strategies import same

W, B = torch.ones(3, 2), torch.ones(2)
PARAMS = {"w": W, "b": B}


def state_of(params: Any = None, stage: int = 0) -> Any:
    return make(PARAMS if params is None else params, stage=stage)


def with_gradient(state: Any) -> Any:
    return fzero.grad_and_reduce(lambda p: p["w"].sum() + p["b"].sum(), state)()[0]


# Another model


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"w": torch.ones(2, 3), "b": B}, r"w: \(3, 2\) .* in the checkpoint, \(2, 3\)"),
        ({"w": W.double(), "b": B}, "w: .*float32 .*float64 trainable in"),
        ({"w": W}, r"b: \(2,\) torch.float32 trainable in .*, nothing in the state"),
        (PARAMS | {"v": torch.ones(1)}, r"v: nothing in the checkpoint, \(1,\) torch.float32"),
        (
            {"w": W, "b": Parameter(B, requires_grad=False)},
            r"b: \(2,\) torch.float32 trainable in .*, \(2,\) torch.float32 frozen in the state",
        ),
        ([torch.ones(2) for _ in range(20)], r"\.\.\. and 14 more"),
    ],
)
def test_another_model_is_refused_by_path(other: Any, line: str, tmp_path: Path) -> None:
    save(tmp_path, state_of())
    into = state_of(other, stage=3)
    before = snapshot(into)
    with pytest.raises(LayoutError, match=line) as raised:
        load(tmp_path, into)
    assert raised.match("Fix: make the state from the model that was saved. Nothing was changed.")
    same(into, before)


# States that cannot be used


def donated(ranks: int) -> Any:
    def step_fn(state: Any) -> Any:
        return fzero.apply_gradients(with_gradient(state)), None

    old = make(PARAMS, stage=1, ranks=ranks)
    step = fzero.shard(step_fn, stage=1, donate=True, bucket_bytes=64)
    (fzero.simulate(step, world_size=ranks) if ranks else step)(old)
    return old


def one_virtual_rank() -> Any:
    stacked = make(PARAMS, stage=1, ranks=2)
    return stacked.replace(step=stacked.step[0])  # as it is inside of fzero.simulate


NO_STATE = r"expected a TrainState or an Engine, got a .*\n.*\nFix: .*path / name"
DONATED = r"this state was donated: a newer state has the .* now\.\n.*\nFix: go on with the state"
UNUSABLE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "parameters": (lambda: PARAMS, LayoutError, NO_STATE),
    "several states": (lambda: {"a": state_of()}, LayoutError, NO_STATE),
    "nothing": (lambda: None, LayoutError, NO_STATE),
    "donated": (lambda: donated(0), DonatedError, DONATED),
    "a donated stack": (lambda: donated(2), DonatedError, DONATED),
    "one virtual rank's": (
        one_virtual_rank,
        AxisError,
        r"a state of one virtual rank.*\n.*inside fzero.simulate.\nFix: call it outside",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_state_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    found, error, words = UNUSABLE[name]
    state = found()
    said = words if error is DonatedError else "{}: " + words
    with pytest.raises(error, match=said.format("save")):
        save(tmp_path / "new", state)
    with pytest.raises(error, match=said.format("load")):
        load(tmp_path / "new", state)
    assert not (tmp_path / "new").exists()


def test_a_state_between_gradient_and_update_is_refused(tmp_path: Path) -> None:
    state = with_gradient(fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=0))
    with pytest.raises(PhaseError, match=r"1 backwards, window closed.*\n.*\nFix: save the state"):
        save(tmp_path, state)
    save(tmp_path, fzero.apply_gradients(state))


def test_an_open_window_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "there", state_of())

    @fzero.coalesce
    def saving(state: Any) -> Any:
        save(tmp_path / "new", state)

    @fzero.coalesce
    def loading(state: Any) -> Any:
        return load(tmp_path / "there", state), None

    with pytest.raises(PhaseError, match=r"save: .* window open"):
        saving(state_of())
    with pytest.raises(PhaseError, match="load: the state has an open coalescing window"):
        loading(state_of())
    assert not (tmp_path / "new").exists()


# Paths, and what is at them


def test_an_extra_comes_back_unless_it_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(
        LayoutError, match=r"a Tensor is not one of JSON's kinds.*\n.*\nFix: give a dict of numbers"
    ):
        save(tmp_path / "x", state_of(), extra={"loss": torch.ones(())})
    assert not (tmp_path / "x").exists()
    extra = {"epoch": 3, "best": float("inf"), "names": ["a", None], "deep": {"x": 0.1}}
    save(tmp_path, state_of(), extra=extra)
    assert read_extra(tmp_path) == extra
    save(tmp_path, state_of())
    assert read_extra(tmp_path) == {}


def refused(path: Path, into: Any, words: str) -> None:
    """Assert that `load` raises one error that says so, without torch's own traceback."""
    with pytest.raises(CheckpointError, match=words) as raised:
        load(path, into)
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("Traceback") == 1 and "site-packages/torch" not in text
    assert text.count("Usual cause") == 1 and len(str(raised.value).splitlines()) == 3


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        refused(path, state_of(), f"there is no checkpoint at {path}: no checkpoint.json in it")
        with pytest.raises(CheckpointError, match=r"no checkpoint.json in it"):
            read_extra(path)
    with pytest.raises(CheckpointError, match=r"could not make .*file/x.*NotADirectory"):
        save(tmp_path / "file" / "x", state_of())
    assert issubclass(CheckpointError, FzeroError) and issubclass(CheckpointError, OSError)


def test_paths_that_cannot_be_are_refused_and_an_empty_one_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LayoutError, match="save: the path is empty"):
        save("", state_of())  # others are in test_special_files.py
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(CheckpointError, match=f"could not make .*{name[:1]}"):
            save(name, state_of())
    assert list(tmp_path.iterdir()) == []
    save(".", state_of())  # the current folder, by its name
    assert read_extra(".") == {}


# Damage


def flip(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(bytes(data))


def cut(file: Path, at: float = 0.99) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(at * len(data))])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (cut, "has .* bytes, .* were written"),
    "one bit": (flip, "is not what .* checksum is wrong"),
    "gone": (Path.unlink, "is missing"),
}


@covered(name=["__0_0.distcp", ".metadata"], damage=[*DAMAGE])
def test_damaged_data_is_found_before_it_is_used(name: str, damage: str, tmp_path: Path) -> None:
    save(tmp_path, train(state_of(mixed(seed=1)), 1))
    (file,) = tmp_path.glob(f"data-*/{name}")
    do, message = DAMAGE[damage]
    do(file)
    into = state_of(mixed())
    before = snapshot(into)
    refused(tmp_path, into, rf"damaged: .*{name} {message}.*\n.*\nFix: use another copy")
    same(into, before)


def test_data_that_torch_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it happens when a file changes after it was checked."""
    monkeypatch.setattr("fzero.checkpoint.folders.require_whole", lambda *_: None)
    save(tmp_path, state_of())
    (file,) = tmp_path.glob("data-*/*.distcp")
    file.write_text("no tensors")
    refused(tmp_path, state_of(), "its checksum is wrong")


def test_a_damaged_manifest_is_found(tmp_path: Path) -> None:
    manifest = tmp_path / "checkpoint.json"
    for at in (0.1, 0.5, 0.9):
        for damage in (flip, cut):
            save(tmp_path, state_of(), extra={"text": "x" * 2000})
            damage(manifest, at)
            refused(tmp_path, state_of(), "damaged: .*checkpoint.json is no manifest")


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fzero.checkpoint.manifest.FORMAT", 99)
        save(tmp_path, state_of())
    refused(tmp_path, state_of(), r"another format than \(3, 4\): 99.\n.*\nFix: update fzero")


def test_a_checkpoint_of_a_former_format_is_read(tmp_path: Path) -> None:
    """It was written by an earlier version, after one step of an engine at stage 2."""
    copied = shutil.copytree(Path(__file__).parent / "former" / "format3", tmp_path / "x")
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    engine, extra = load_with_extra(copied, Engine(module, optimizer, stage=3))
    params = fzero.full_params(engine.state)
    assert params["0.weight"].tolist() == [[-0.5, -2.0, 1.0], [2.5, 1.0, 4.0]]
    assert params["0.bias"].tolist() == [6.0, -9.0]
    assert engine.full_optimizer_state("0.weight", "momentum_buffer").tolist() == [[1, 6, 2]] * 2
    assert (extra, optimizer.param_groups[0]["lr"], int(engine.state.step)) == (
        {"epoch": 3},
        0.25,
        1,
    )


def test_the_manifest_says_where_it_came_from(tmp_path: Path) -> None:
    save(tmp_path, make(PARAMS, stage=2, ranks=3))
    body = json.loads((tmp_path / "checkpoint.json").read_text())["checkpoint"]
    origin = {"stage": 2, "ranks": 3, "optimizer": "adam", "torch": torch.__version__}
    assert body["origin"] == origin
    assert body["leaves"]["w"] == "(3, 2) torch.float32 trainable"


# One rank of several


def _wrong_on_one_rank(rank: int, size: int, folder: Path, wrong: str) -> None:
    state, last = state_of(), rank == size - 1
    if wrong == "paths":
        save(folder / str(rank), state)
    elif wrong == "steps":
        save(folder, state.replace(step=state.step + rank))
    elif wrong == "phase":
        held = with_gradient(state)
        save(folder, held if last else state)
    elif wrong == "extra":
        save(folder, state, extra={"x": torch.ones(1)} if last else {})
    elif wrong == "an empty path to save":
        save("" if last else folder, state)
    else:
        load("" if last else folder, state)


HEARD = {
    "paths": r"rank 0 has path .*/0, rank 1 has path .*/1",
    "steps": "rank 0 has step 0, rank 1 has step 1",
    "phase": "1 backwards",
    "extra": "a Tensor is not one of JSON's kinds",
    "an empty path to save": "save: the path is empty",
    "an empty path to load": "load: the path is empty",
}


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("wrong", HEARD)
def test_every_rank_hears_what_is_wrong_on_one(wrong: str, tmp_path: Path) -> None:
    for _, message in run_ranks(_wrong_on_one_rank, 2, tmp_path / "x", wrong, raises=True):
        assert re.search(HEARD[wrong], message)
    assert list(tmp_path.iterdir()) == []


def _load_damaged(rank: int, size: int, folder: Path) -> None:
    load(folder, state_of(stage=3))


@pytest.mark.xdist_group("gloo")
def test_every_rank_hears_of_a_damaged_file(tmp_path: Path) -> None:
    save(tmp_path, state_of())
    (file,) = tmp_path.glob("data-*/*.distcp")
    flip(file)
    for kind, message in run_ranks(_load_damaged, 2, tmp_path, raises=True):
        assert kind == "CheckpointError"
        assert "__0_0.distcp is not what was written" in message
