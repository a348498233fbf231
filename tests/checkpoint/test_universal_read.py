"""Folders as DeepSpeed's converter leaves them, made by hand, are read; DeepSpeed is not there."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, load_universal, save_universal
from tests.checkpoint.states import contents, first_rank, make, slot_of, whole
from tests.checkpoint.universal_folders import DynamicLossScaler, adam, as_stage_2, as_stage_3
from tests.covering import covered
from tests.strategies import same

RULE = fzero.optim.adamw(0.25, betas=(0.5, 0.75), weight_decay=0.125)  # as GROUPS

W, B = torch.arange(15.0).reshape(5, 3) + 2.0**-12, torch.arange(5.0)


def _adam_state(stage: int, *, low: bool = False, ranks: int = 3) -> Any:
    weight = W.bfloat16() if low else W
    params = {"w": torch.zeros_like(weight), "b": torch.zeros(5)}
    return make(params, stage=stage, ranks=ranks, optimizer=RULE)


@covered(form=[as_stage_2, as_stage_3], low=[False, True], stage=[0, 1, 3])
def test_a_folder_of_deepspeed_is_read(
    form: Any, low: bool, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # an import of it would raise
    parts = adam(w=W, b=B)
    form(tmp_path, parts)
    loaded = load_universal(tmp_path, _adam_state(stage, low=low))
    found = first_rank(loaded)
    same(whole(loaded), {"w": W.bfloat16() if low else W, "b": B})
    for name in ("w", "b"):
        for slot, key in enumerate(("exp_avg", "exp_avg_sq")):
            assert torch.equal(slot_of(found, slot, name), parts[name][key])
    if low:
        assert torch.equal(slot_of(found, 2, "w"), W)  # the master has all bits
    assert int(found["step"]) == int(found["count"]) == 2


def test_frozen_parameters_are_put_together_of_stage_3(tmp_path: Path) -> None:
    as_stage_3(tmp_path, adam(w=W), frozen={"b": B}, ranks=3)
    params = {"w": torch.zeros(5, 3), "b": nn.Parameter(torch.zeros(5), requires_grad=False)}
    loaded = load_universal(tmp_path, make(params, stage=3, ranks=2, optimizer=RULE))
    assert torch.equal(whole(loaded)["b"], B)


def test_steps_may_be_numbers_or_not_be_counted(tmp_path: Path) -> None:
    only = {"w": {"fp32": W, "momentum_buffer": W + 1}}
    options = [{"lr": 0.5, "momentum": 0.5, "params": [0]}]
    momentum = functools.partial(torch.optim.SGD, lr=7.0, momentum=0.25)
    steps = (2, 2.0, torch.tensor([2]), {"param": torch.tensor(2.0)}, None)
    for number, step in enumerate(steps):
        folder = tmp_path / f"{number}"
        as_stage_2(folder, only, step=step, groups=options)
        rule = fzero.optim.from_torch(momentum)
        state = load_universal(folder, fzero.init({"w": torch.zeros(5, 3)}, rule, stage=1))
        assert int(state.step) == 2  # of 3 updates one was skipped
        assert torch.equal(slot_of(contents(state), 0, "w"), W + 1)
        instance: Any = state.setup.optimizer
        assert instance.instance.param_groups[0]["momentum"] == 0.5


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    as_stage_2(tmp_path, adam(w=W), scaler=DynamicLossScaler(512.0))
    module = nn.Linear(3, 5, bias=False)
    names = torch.optim.AdamW([module.weight], lr=0.5)
    engine = Engine(nn.ParameterDict({"w": module.weight}), names, stage=1, loss_scale="dynamic")
    load_universal(tmp_path, engine)
    scale = engine.state.scale
    assert scale is not None and scale.scale.item() == 512.0
    save_universal(tmp_path, engine)
    load_universal(tmp_path, engine)
    assert engine.state.scale is not None and engine.state.scale.scale.item() == 512.0


def test_buffers_of_an_engine_come_back(tmp_path: Path) -> None:
    def engine() -> Engine:
        module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        return Engine(module, torch.optim.AdamW, stage=3)

    one, two = engine(), engine()
    one(torch.randn(4, 3))
    save_universal(tmp_path, one)
    load_universal(tmp_path, two)
    same(dict(two.module.named_buffers()), dict(one.module.named_buffers()))
    assert int(two.module[1].num_batches_tracked) == 1  # type: ignore


def test_options_of_megatron_beside_the_buffers_are_passed_over(tmp_path: Path) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(5, 3))
    module.register_buffer("mean", torch.zeros(2))
    states = {"module": {"mean": torch.ones(2)}, "args": argparse.Namespace(lr=0.5, size=[1, 2])}
    as_stage_2(tmp_path, adam(w=W), states=states)
    load_universal(tmp_path, Engine(module, torch.optim.AdamW, stage=1))
    assert torch.equal(module.get_buffer("mean"), torch.ones(2))


def test_a_padded_vocabulary_grows_by_zeros(tmp_path: Path) -> None:
    root = as_stage_2(tmp_path, adam(w=W))
    for file in (root / "zero" / "w").glob("[ef]*.pt"):
        value = torch.load(file, weights_only=True)
        torch.save({**value, "vocab_tensor": True}, file)
    state = fzero.init({"w": torch.ones(8, 3)}, RULE, stage=0)
    loaded = load_universal(tmp_path, state)
    moments = (slot_of(contents(loaded), slot, "w") for slot in (0, 1))
    for found, wanted in zip(
        (whole(loaded)["w"], *moments), (W, W + 0.5, W.abs() + 2), strict=True
    ):
        assert torch.equal(found, torch.cat([wanted, torch.zeros(3, 3)]))
    with pytest.raises(CheckpointError, match=r"a parameter of \(5, 3\), which is \(4, 3\) in the"):
        load_universal(tmp_path, fzero.init({"w": torch.ones(4, 3)}, RULE, stage=0))
