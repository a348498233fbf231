"""What `save` and `load` refuse, with which words, and that they leave everything as it was."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import fzero
from fzero.checkpoint import CheckpointError, load, read_extra, save
from fzero.errors import AxisError, DonatedError, FzeroError, LayoutError, PhaseError
from tests.checkpoint.states import ADAM, make, mixed, snapshot, train, unchanged
from tests.ranks import run_ranks

PARAMS = {"w": torch.ones(3, 2), "b": torch.ones(2)}


def _state(params: Any = None, stage: int = 0) -> Any:
    return fzero.init(PARAMS if params is None else params, ADAM, stage=stage)


def _with_gradient(state: Any) -> Any:
    return fzero.grad_and_reduce(lambda p: p["w"].sum() + p["b"].sum(), state)()[0]


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            {"w": torch.ones(2, 3), "b": torch.ones(2)},
            r"w: \(3, 2\) .* in the checkpoint, \(2, 3\)",
        ),
        (
            {"w": torch.ones(3, 2).double(), "b": torch.ones(2)},
            "w: .*float32 .*float64 trainable in",
        ),
        ({"w": torch.ones(3, 2)}, r"b: \(2,\) torch.float32 trainable in .*, nothing in the state"),
        (PARAMS | {"v": torch.ones(1)}, r"v: nothing in the checkpoint, \(1,\) torch.float32"),
        (
            {"w": torch.ones(3, 2), "b": Parameter(torch.ones(2), requires_grad=False)},
            r"b: \(2,\) torch.float32 trainable in .*, \(2,\) torch.float32 frozen in the state",
        ),
    ],
)
def test_another_model_is_refused_by_path(other: Any, line: str, tmp_path: Path) -> None:
    save(tmp_path, _state())
    into = _state(other, stage=3)
    before = snapshot(into)
    with pytest.raises(LayoutError, match=line) as raised:
        load(tmp_path, into)
    assert raised.match("Fix: make the state from the model that was saved. Nothing was changed.")
    unchanged(into, before)


def test_many_differences_are_counted(tmp_path: Path) -> None:
    save(tmp_path, _state([torch.ones(1)] * 1))
    with pytest.raises(LayoutError, match=r"\.\.\. and 12 more"):
        load(tmp_path, _state([torch.ones(2) for _ in range(20)]))


def test_a_state_between_gradient_and_update_is_refused(tmp_path: Path) -> None:
    state = _with_gradient(_state())
    with pytest.raises(PhaseError, match=r"1 backwards, window closed.*\n.*\nFix: save the state"):
        save(tmp_path, state)
    save(tmp_path, fzero.apply_gradients(state))


def test_an_open_window_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "there", _state())

    @fzero.coalesce
    def saving(state: Any) -> Any:
        save(tmp_path / "new", state)

    @fzero.coalesce
    def loading(state: Any) -> Any:
        return load(tmp_path / "there", state), None

    with pytest.raises(PhaseError, match=r"save: .* window open"):
        saving(_state())
    with pytest.raises(PhaseError, match="load: the state has an open coalescing window"):
        loading(_state())
    assert not (tmp_path / "new").exists()


def test_gradients_without_any_trainable_leaf_count_too(tmp_path: Path) -> None:
    state = fzero.init({"w": torch.ones(2)}, ADAM, stage=0, trainable=lambda path: False)
    state, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
    with pytest.raises(PhaseError, match="1 backwards"):
        save(tmp_path, state)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_donated_state_is_refused(ranks: int, tmp_path: Path) -> None:
    old = make(PARAMS, stage=1, ranks=ranks)

    def step_fn(state: Any) -> Any:
        return fzero.apply_gradients(_with_gradient(state)), None

    step = fzero.shard(step_fn, stage=1, donate=True, bucket_bytes=64)
    new, _ = (fzero.simulate(step, world_size=ranks) if ranks else step)(old)
    save(tmp_path, new)
    with pytest.raises(DonatedError, match="save: this state was donated: the parameters of"):
        save(tmp_path, old)
    with pytest.raises(DonatedError, match="load: this state was donated"):
        load(tmp_path, old)


def test_one_virtual_rank_alone_is_refused(tmp_path: Path) -> None:
    def step_fn(state: Any) -> Any:
        save(tmp_path, state)
        return state, None

    step = fzero.simulate(fzero.shard(step_fn, stage=1), world_size=2)
    with pytest.raises(AxisError, match=r"called inside fzero.simulate.\nFix: call it outside"):
        step(step.init(PARAMS, ADAM))


@pytest.mark.parametrize("other", [{"a": _state()}, PARAMS, "path", None])
def test_something_else_than_a_state_is_refused(other: Any, tmp_path: Path) -> None:
    with pytest.raises(
        LayoutError, match=r"(?s)save: expected a TrainState or an Engine, got a .*path / name"
    ):
        save(tmp_path, other)
    with pytest.raises(LayoutError, match="load: expected a TrainState or an Engine"):
        load(tmp_path, other)


def test_an_extra_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"Tensor is not JSON.*\n.*\nFix: give a dict of numbers"):
        save(tmp_path / "x", _state(), extra={"loss": torch.ones(())})
    assert not (tmp_path / "x").exists()


def test_extra_comes_back(tmp_path: Path) -> None:
    extra = {"epoch": 3, "best": float("inf"), "names": ["a", None], "deep": {"x": 0.1}}
    save(tmp_path, _state(), extra=extra)
    assert read_extra(tmp_path) == extra
    save(tmp_path, _state())
    assert read_extra(tmp_path) == {}


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"there is no checkpoint at {path}"):
            load(path, _state())
        with pytest.raises(CheckpointError, match=r"no checkpoint.json in it"):
            read_extra(path)
    assert issubclass(CheckpointError, FzeroError) and issubclass(CheckpointError, OSError)


def test_an_empty_path_is_refused_and_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, call in {
        "save": lambda: save("", _state()),
        "load": lambda: load("", _state()),
        "read_extra": lambda: read_extra(""),
    }.items():
        with pytest.raises(LayoutError, match=f"{name}: the path is empty"):
            call()
    assert list(tmp_path.iterdir()) == []
    save(".", _state())  # the current folder, by its name
    assert read_extra(".") == {}


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("damage", ["no checkpoint", "manifest", "data that torch cannot read"])
def test_a_failed_load_shows_one_error(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage != "no checkpoint":
        save(tmp_path, _state())
    if damage == "manifest":
        (tmp_path / "checkpoint.json").write_text("not JSON")
    if damage.startswith("data"):  # as it happens when a file changes after it was checked
        monkeypatch.setattr("fzero.checkpoint._load.require_whole", lambda *_: None)
        (file,) = tmp_path.glob("data-*/*.distcp")
        file.write_text("no tensors")
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, _state())
    text = _shown(raised.value)
    assert text.count("Traceback") == 1 and "site-packages/torch" not in text
    assert text.count("Usual cause") == 1 and len(str(raised.value).splitlines()) == 3


def _flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(bytes(data))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE = {
    "cut off": (_cut, "has .* bytes, .* were written"),
    "one bit": (lambda file: _flip(file, 0.5), "is not what .* checksum is wrong"),
    "gone": (lambda file: file.unlink(), "is missing"),
}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data_is_found_before_it_is_used(name: str, damage: str, tmp_path: Path) -> None:
    save(tmp_path, train(_state(mixed(seed=1)), 1))
    (file,) = tmp_path.glob(f"data-*/{name}")
    do, message = DAMAGE[damage]
    do(file)
    into = _state(mixed())
    before = snapshot(into)
    with pytest.raises(CheckpointError, match=f"damaged: .*{name} {message}") as raised:
        load(tmp_path, into)
    assert raised.match("Fix: use another copy of the checkpoint")
    unchanged(into, before)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_damaged_manifest_is_found(at: float, tmp_path: Path) -> None:
    save(tmp_path, _state(), extra={"text": "x" * 2000})
    good = (tmp_path / "checkpoint.json").read_bytes()
    _flip(tmp_path / "checkpoint.json", at)
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged"):
        load(tmp_path, _state())
    (tmp_path / "checkpoint.json").write_bytes(good[: int(at * len(good))])
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged"):
        load(tmp_path, _state())
    (tmp_path / "checkpoint.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged"):
        load(tmp_path, _state())


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fzero.checkpoint._manifest.FORMAT", 3)
        save(tmp_path, _state())
    with pytest.raises(CheckpointError, match=r"another format than 2.*\n.*\nFix: load it with"):
        load(tmp_path, _state())


def test_the_manifest_says_where_it_came_from(tmp_path: Path) -> None:
    save(tmp_path, make(PARAMS, stage=2, ranks=3))
    body = json.loads((tmp_path / "checkpoint.json").read_text())["checkpoint"]
    assert body["origin"] | {"torch": ""} == {
        "stage": 2, "ranks": 3, "optimizer": "adam", "torch": "",
    }  # fmt: skip
    assert body["leaves"] == {
        "b": "(2,) torch.float32 trainable",
        "w": "(3, 2) torch.float32 trainable",
    }


def _disagree(rank: int, size: int, folder: Path) -> None:
    save(folder / str(rank), _state())


def _out_of_step(rank: int, size: int, folder: Path) -> None:
    state = _state()
    save(folder, state.replace(step=state.step + rank))


def _one_path_is_empty(rank: int, size: int, folder: Path, name: str) -> None:
    path = "" if rank == 1 else folder
    save(path, _state()) if name == "save" else load(path, _state())


def _one_is_not_ready(rank: int, size: int, folder: Path, how: str) -> None:
    fresh = _state()
    held = _with_gradient(fresh)
    state = held if rank == 1 and how == "phase" else fresh
    extra = {"x": torch.ones(1)} if rank == 1 and how == "extra" else {}
    save(folder, state, extra=extra)


def _load_damaged(rank: int, size: int, folder: Path) -> None:
    load(folder, _state(stage=3))


@pytest.mark.xdist_group("gloo")
def test_every_rank_hears_what_one_rank_found(tmp_path: Path) -> None:
    for _, message in run_ranks(_disagree, 2, tmp_path, raises=True):
        assert f"rank 0 has path {tmp_path}/0, rank 1 has path {tmp_path}/1" in message
    for _, message in run_ranks(_out_of_step, 2, tmp_path / "x", raises=True):
        assert "rank 0 has step 0, rank 1 has step 1" in message
    for _, message in run_ranks(_one_path_is_empty, 2, tmp_path / "x", "save", raises=True):
        assert "save: the path is empty" in message
    for _, message in run_ranks(_one_path_is_empty, 2, tmp_path / "x", "load", raises=True):
        assert "rank 1 has path ." in message
    for how, seen in (("phase", "1 backwards"), ("extra", "Tensor is not JSON")):
        for _, message in run_ranks(_one_is_not_ready, 2, tmp_path / "x", how, raises=True):
            assert seen in message
    assert list(tmp_path.iterdir()) == []
    save(tmp_path, _state())
    (file,) = tmp_path.glob("data-*/*.distcp")
    _flip(file, 0.5)
    for kind, message in run_ranks(_load_damaged, 2, tmp_path, raises=True):
        assert kind == "CheckpointError"
        assert "__0_0.distcp is not what was written" in message
