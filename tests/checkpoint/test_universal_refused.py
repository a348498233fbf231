"""Damaged and foreign folders are refused with the name of what is wrong; nothing is changed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, load_universal, save_universal
from tests.checkpoint.forge import Runs
from tests.checkpoint.states import snapshot
from tests.checkpoint.universal_folders import adam, as_stage_2, as_stage_3, put
from tests.ranks import run_ranks
from tests.strategies import same

W, B = torch.arange(15.0).reshape(5, 3), torch.arange(5.0)
NET = adam(weight=W, bias=B)
RULE = fzero.optim.adamw(0.25, betas=(0.5, 0.75), weight_decay=0.125)


def _engine() -> Engine:
    return Engine(nn.Linear(3, 5), torch.optim.AdamW, stage=2)


def _refused(folder: Path, match: str) -> None:
    """By a state, and by an engine, which have afterwards what they had before."""
    state = fzero.init({"weight": torch.ones(5, 3), "bias": torch.ones(5)}, RULE, stage=3)
    engine = _engine()
    before = snapshot((state, engine.state))
    options = [dict(group) for group in engine.optimizer.param_groups]
    for into in (state, engine):
        with pytest.raises(CheckpointError, match=match) as raised:
            load_universal(folder, into)
        assert "Fix: " in str(raised.value)
    same((state, engine.state), before)
    assert [dict(group) for group in engine.optimizer.param_groups] == options


def _cut(file: str, keep: int) -> Callable[[Path], Any]:
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:keep])


def _remove(file: str) -> Callable[[Path], None]:
    return lambda root: (root / file).unlink()


def _with(file: str, value: Any) -> Callable[[Path], None]:
    return lambda root: put(root / file, value)


def _changed(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        shared = {"param_groups": [{"lr": 0.25}], "ds_version": "0.19.8"}
        put(root / file, {**shared, **changes})

    return change


def _flipped(root: Path) -> None:
    """One bit of one value: torch.load reads it as it is."""
    content = bytearray((root / FP32).read_bytes())
    content[content.index(W.numpy().tobytes()) + 9] ^= 4
    (root / FP32).write_bytes(content)
    assert not torch.equal(torch.load(root / FP32, weights_only=True)["param"], W)


def _linked(root: Path) -> None:
    file = root / "zero" / "weight" / "fp32.pt"
    file.rename(root.parent / "elsewhere.pt")
    file.symlink_to(root.parent / "elsewhere.pt")


def _linked_folder(root: Path) -> None:
    (root / "zero" / "weight").rename(root.parent / "elsewhere")
    (root / "zero" / "weight").symlink_to(root.parent / "elsewhere")


def _unjoined(place: str) -> Callable[[Path], None]:
    """A conversion that was cut off before it joined the slices of tensor-parallel ranks."""

    def move(root: Path) -> None:
        held = root / "zero" / "weight"
        files = [(file.stem, file.read_bytes()) for file in held.iterdir()]
        shutil.rmtree(held)
        (root / place / "weight" / "0").mkdir(parents=True)
        for name, content in files:
            (root / place / "weight" / "0" / f"{name}.01").write_bytes(content)

    return move


FP32, AVG, STEP, SHARED = (
    "zero/weight/fp32.pt", "zero/bias/exp_avg.pt", "zero/bias/step.pt", "zero/optimizer_state.pt",
)  # fmt: skip
HUGE = torch.zeros(1).expand(10**12)
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no values": (_remove(FP32), r"zero/weight/fp32.pt is missing"),
    "no moment": (_remove(AVG), r"zero/bias/exp_avg.pt is missing"),
    "no step": (_remove(STEP), r"zero/bias/step.pt is missing, and zero/weight/step.pt is there"),
    "no options": (_remove(SHARED), r"optimizer_state.pt is missing"),
    "no parameter": (lambda root: shutil.rmtree(root / "zero/bias"), r"zero/bias/\w+.pt is miss"),
    "nothing": (lambda root: shutil.rmtree(root), "u has no folder zero"),
    "no latest": (lambda root: (root.parent / "latest_universal").unlink(), "no universal checkp"),
    "a path as latest": (
        lambda root: (root.parent / "latest_universal").write_text("../u"), r"names '../u', which",
    ),
    "a hidden latest": (
        lambda root: (root.parent / "latest_universal").write_text(".x"), r"names '.x', which",
    ),
    "cut off": (_cut(FP32, 300), r"weight/fp32.pt is no file of torch.save"),
    "empty": (_cut(AVG, 0), r"bias/exp_avg.pt is no file of torch.save"),
    "one bit": (_flipped, r"weight/fp32.pt is not what was written"),
    "no zip": (
        lambda root: torch.save(W, root / FP32, _use_new_zipfile_serialization=False),
        r"weight/fp32.pt is no file of torch.save",
    ),
    "a shape": (_with(FP32, {"param": W.T}), r"a parameter of \(3, 5\), which is \(5, 3\) in"),
    "another length": (_with(FP32, W.reshape(-1)[:9]), r"of \(9,\), which is \(5, 3\) in the"),
    "flat, with a key": (_with(FP32, {"param": W.reshape(-1)}), r"of \(15,\), which is \(5, 3\)"),
    "a huge shape": (_with(FP32, HUGE), r"a parameter of \(1000000000000,\), which is"),
    "another key": (_with(FP32, {"params": W}), r"weight/fp32.pt has no 'param', but \['params'\]"),
    "a list": (_with(FP32, [W]), r"weight/fp32.pt holds no plain tensor, but a list"),
    "a number": (_with(AVG, {"param": 3}), r"bias/exp_avg.pt holds no plain tensor, but a int"),
    "sparse": (_with(FP32, W.to_sparse()), r"weight/fp32.pt holds no plain tensor"),
    "meta": (_with(FP32, torch.empty(5, 3, device="meta")), r"weight/fp32.pt"),
    "a dtype": (_with(FP32, {"param": W.long()}), r"has weight as torch.int64, torch.float32 in"),
    "half a step": (_with(STEP, 2.5), r"bias/step.pt has the step 2.5, which is no number of up"),
    "no number": (_with(STEP, torch.tensor(torch.nan)), r"bias/step.pt has the step nan"),
    "too many steps": (_with(STEP, 10**400), r"bias/step.pt has the step 1000"),
    "a negative step": (_with(STEP, -1), r"bias/step.pt has the step -1"),
    "a string": (_with(STEP, "2"), r"bias/step.pt has the step '2'"),
    "no groups": (_with(SHARED, {"lr": 1}), r"optimizer_state.pt has no list of param_groups"),
    "a tensor of options": (_with(SHARED, W), r"optimizer_state.pt holds no dict, but a Tensor"),
    "a step in the options": (
        _changed(SHARED, optimizer_state_dict={"state": {0: {"step": 9}}}),
        r"two steps: 2 by zero/\w+/step.pt, 9 by zero/optimizer_state.pt, group 0",
    ),
    "a scale": (_changed(SHARED, loss_scale=-1.0), r"optimizer_state.pt has the loss scale -1.0"),
    "more parameters": (
        _with("zero/more/exp_avg.pt", {"param": W}), "zero/more is a parameter that this state has",
    ),
    "a link": (_linked, r"fp32.pt is a link: it would be read from elsewhere"),
    "a linked folder": (_linked_folder, r"zero/weight is a link"),
    "slices apart": (_unjoined("tmp"), "weight is there in slices of tensor-parallel ranks"),
    "slices in their place": (_unjoined("zero"), "weight is there in slices of tensor-parallel r"),
    "model states": (
        lambda root: _cut("mp_rank_00_model_states.pt", 99)(root),
        r"model_states.pt cannot be read",
    ),
}  # fmt: skip


# torch 2.11 warns that it does not check a sparse tensor that it reads, torch 2.15 that it does.
@pytest.mark.filterwarnings("ignore:.*sparse tensor:UserWarning")
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    damage, match = DAMAGE[name]
    root = as_stage_2(tmp_path, NET)
    load_universal(tmp_path, _engine())
    damage(root)
    _refused(tmp_path, match)


@pytest.mark.parametrize("lr", ["x", torch.ones(2), None])
def test_options_that_cannot_be_are_refused(lr: Any, tmp_path: Path) -> None:
    as_stage_2(tmp_path, NET, groups=[{"lr": lr}])
    engine = _engine()
    if isinstance(lr, torch.Tensor):  # not an option that an optimizer has as a number: left out
        load_universal(tmp_path, engine)
        assert engine.optimizer.param_groups[0]["lr"] == 1e-3
        return
    before = snapshot(engine.state)
    with pytest.raises(CheckpointError, match="option lr of param group 0 is"):
        load_universal(tmp_path, engine)
    same(engine.state, before)


@pytest.mark.parametrize("betas", ["xy", (0.5,), 0.5, True])
def test_options_of_another_form_are_refused(betas: Any, tmp_path: Path) -> None:
    as_stage_2(tmp_path, NET, groups=[{"lr": 0.5, "betas": betas}])
    engine = _engine()
    with pytest.raises(CheckpointError, match=r"has betas=.* betas=\(0.9, 0.999\) here"):
        load_universal(tmp_path, engine)
    assert engine.optimizer.param_groups[0]["lr"] == 1e-3
    rule = fzero.init({"weight": torch.ones(5, 3), "bias": torch.ones(5)}, RULE, stage=1)
    with pytest.warns(UserWarning, match="betas="):
        load_universal(tmp_path, rule)


def test_steps_of_stage_3_that_differ_are_refused(tmp_path: Path) -> None:
    root = as_stage_3(tmp_path, NET)
    inner = {"state": {0: {"step": torch.tensor(2.0)}, 1: {"step": torch.tensor(4.0)}}}
    put(root / SHARED, {"optimizer_state_dict": inner, "param_groups": [{"lr": 0.25}]})
    _refused(tmp_path, "two steps: 2 by .*group 0, 4 by .*group 1")


@pytest.mark.parametrize("file", [FP32, AVG, STEP, SHARED, "mp_rank_00_model_states.pt"])
@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("touch here",), r"posix\.system"),
        (eval, ("open('here', 'w')",), r"builtins\.eval"),
        (torch.load, ("here",), r"torch\.serialization\.load"),
    ],
)
def test_a_pickle_with_a_call_is_refused_and_not_run(
    file: str, function: Any, args: Any, name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    root = as_stage_2(tmp_path, NET, step=None if "model" in file else 2)  # else nobody reads them
    put(root / file, {"param": W, "param_groups": [Runs(function, *args)]})
    _refused(tmp_path, rf"{file} names {name}: nothing but tensors, numbers")
    assert not (tmp_path / "here").exists()


@given(st.data())
def test_a_byte_that_changed_is_noticed_or_means_nothing(data: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = fzero.init({"weight": W, "bias": B}, RULE, stage=1)
        save_universal(folder, state)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        file = data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        into = fzero.init({"weight": W + 9, "bias": B + 9}, RULE, stage=1)
        before = snapshot(into)
        try:
            found = load_universal(folder, into)
        except CheckpointError:
            same(into, before)
        else:
            same(fzero.full_params(found), {"weight": W, "bias": B})
            same(found.optimizer, state.optimizer)


def _each_refuses(rank: int, size: int, folder: Path) -> None:
    engine = _engine()
    before = snapshot(engine.state)
    with pytest.raises(CheckpointError, match=r"bias/exp_avg.pt is no file of torch.save"):
        load_universal(folder, engine)
    same(engine.state, before)


@pytest.mark.xdist_group("gloo")
def test_every_rank_refuses_what_one_has_found(tmp_path: Path) -> None:
    _cut(AVG, 300)(as_stage_2(tmp_path, NET))
    run_ranks(_each_refuses, 3, tmp_path)
