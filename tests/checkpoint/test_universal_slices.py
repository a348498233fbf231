"""What tensor-parallel ranks have of a parameter, joined as DeepSpeed's converter joins it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.checkpoint import CheckpointError, load_universal
from fzero.checkpoint._tensor_slices import whole_parameter
from tests.checkpoint.states import snapshot
from tests.checkpoint.universal_folders import GROUPS, LossScaler, put
from tests.strategies import same

W = torch.arange(48.0).reshape(12, 4)
QKV = {"patterns": [r".*qkv.*"], "shape": [(6, 3, 3), 4], "partition_dim": 0}


def _cut(sizes: Sequence[int]) -> list[Tensor]:
    """Each rank's part of several parameters in one, each cut by 3."""
    parts = [part.chunk(3) for part in W.split(list(sizes))]
    return [torch.cat([part[rank] for part in parts]) for rank in range(3)]


CUTS: dict[str, tuple[str, Any, Sequence[Tensor], Tensor]] = {
    "along dim 0": ("x.w", {}, W.chunk(3), W),
    "along dim 1": (
        "x.dense.w",
        {"parameter_with_row_parallelism_patterns": [r".*dense\.w"]},
        W.chunk(2, dim=1),
        W,
    ),
    "not cut": ("x.norm", {"tp_replicated_parameter_patterns": [r".*norm"]}, [W, W], W),
    "each its own": ("x.mean", {"parameter_to_average_patterns": [".*mean"]}, [W - 1, W + 1], W),
    "two in one": ("x.glu", {"parameter_with_2_sub_params_cat_dim_0": [r".*glu"]}, _cut([6, 6]), W),
    "several in one": ("x.qkv", {"parameter_with_sub_params": [QKV]}, _cut([6, 3, 3]), W),
    "so many of one size": (
        "x.qkv",
        {"parameter_with_sub_params": [{**QKV, "shape": [2, -1]}]},
        _cut([6, 6]),
        W,
    ),
    "of other widths": (
        "x.qkv",
        {
            "parameter_with_sub_params": [{**QKV, "shape": [(8, 4), 4]}],
            "universal_checkpoint_version": 0.4,
            "sub_param_shard_widths": {QKV["patterns"][0]: [[5, 3], [1, 3]]},
        },
        [torch.cat([W[:5], W[8:9]]), torch.cat([W[5:8], W[9:]])],
        W,
    ),
    "a vocabulary": (
        "x.embed",
        {"vocabulary_parameter_patterns": [r".*embed"], "original_vocab_size": 10},
        W.chunk(3),
        W[:10],
    ),
}


@pytest.mark.parametrize("how", CUTS)
def test_slices_become_what_was_cut(how: str, tmp_path: Path) -> None:
    """By the rule alone, and by a load of parts of slices that data-parallel ranks had."""
    name, info, slices, wanted = CUTS[how]
    found = whole_parameter(name, slices, info)
    found = found["param"] if isinstance(found, dict) else found
    assert torch.equal(found.reshape(wanted.shape), wanted)
    root = folder_of_slices(tmp_path, name, info, slices)
    state = state_of(name, stage=3)
    loaded = load_universal(tmp_path, state)
    padding = torch.zeros(12 - len(wanted), 4)
    assert torch.equal(fzero.full_params(loaded)[name], torch.cat([wanted, padding]))
    moment = loaded.optimizer.moments[0][0][: wanted.numel()].reshape(wanted.shape)
    assert torch.equal(moment, 2 * wanted)
    assert int(loaded.step) == 5
    shutil.rmtree(root / "zero" / name, ignore_errors=True)
    (root / "tmp" / name).rename(root / "zero" / name)
    same(fzero.full_params(load_universal(tmp_path, state)), fzero.full_params(loaded))
    # A data-parallel rank's part of one slice is not there.
    (root / "zero" / name / "1" / "exp_avg.01").unlink()
    _refused(tmp_path, name, r"zero/x\.\w+(\.w)? cannot be joined")


def state_of(name: str, *, stage: int) -> Any:
    rule = fzero.optim.adamw(0.25, betas=(0.5, 0.75), weight_decay=0.125)
    return fzero.init({name: torch.ones(12, 4)}, rule, stage=stage)


def _refused(folder: Path, name: str, match: str) -> None:
    into = state_of(name, stage=1)
    before = snapshot(into)
    with pytest.raises(CheckpointError, match=match):
        load_universal(folder, into)
    same(into, before)


def folder_of_slices(
    folder: Path, name: str, info: Mapping[str, Any], slices: Sequence[Tensor], *, pipeline: int = 2
) -> Path:
    """Slices as the converter extracts them, of 2 data-parallel ranks and 2 pipeline stages."""
    root = folder / "u"
    for rank, one in enumerate(slices):
        place = root / "tmp" / name / str(rank)
        flat = one.reshape(-1)
        cut = flat.numel() // 2 + 1
        for part, piece in enumerate((flat[:cut], flat[cut:])):
            for key, factor in (("fp32", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
                put(place / f"{key}.{part:02d}", factor * piece)
            put(place / f"step.{part:02d}", torch.tensor(5.0))
        for stage in range(pipeline):  # the parameter is in the last one
            shapes = {name: one.shape} if stage == pipeline - 1 else {"other": torch.Size([1])}
            number = stage * len(slices) + rank
            put(
                root / f"mp_rank_{number:02d}_model_states.pt",
                {
                    "param_shapes": [shapes],
                    "universal_checkpoint_info": dict(info),
                    "checkpoint_parallel_dimensions": {"tp_degree": len(slices)},
                },
            )
    shared = {"loss_scaler": LossScaler(1.0), "param_groups": GROUPS}
    put(root / "zero" / "optimizer_state.pt", shared)
    (folder / "latest_universal").write_text("u")
    return root


def test_slices_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    name, info, slices, _ = CUTS["not cut"]
    root = folder_of_slices(tmp_path, name, info, [slices[0], slices[1] + 1])
    _refused(tmp_path, name, "ranks 0 and 1 differ in what they both have")
    put(root / "tmp" / name / "1" / "step.01", torch.tensor(4.0))
    _refused(tmp_path, name, "has step 5, step.01 beside it has 4")
    for file in (root / "tmp" / name / "1").iterdir():
        file.unlink()
    _refused(tmp_path, name, r"slices of the tensor-parallel ranks \[0\], 2 were saved")


@pytest.mark.parametrize(
    ("info", "match"),
    [
        ({"affine_map": {"params": {"x": {}}}}, "as affine_map says, which only DeepSpeed"),
        ({"vocabulary_parameter_patterns": ["x.*", ".*w"]}, "two patterns describe it"),
        ({"parameter_with_sub_params": [{**QKV, "patterns": ["x"], "shape": [5, 4]}]}, "joined"),
        ({"parameter_with_sub_params": 3}, "cannot be joined"),
        ({"vocabulary_parameter_patterns": ["("]}, "cannot be joined"),
        ({"vocabulary_parameter_patterns": ["x"]}, "cannot be joined: 'original_vocab_size'"),
    ],
)
def test_odd_descriptions_are_refused(info: Any, match: str, tmp_path: Path) -> None:
    folder_of_slices(tmp_path, "x.w", info, W.chunk(3))
    _refused(tmp_path, "x.w", match)
