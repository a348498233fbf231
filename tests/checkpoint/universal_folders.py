"""Universal checkpoints made by hand, as DeepSpeed's converter leaves them; plain torch, no fzero.

`as_stage_2` and `as_stage_3` are the two forms that ds_to_universal 0.19.8 writes, with the classes
of DeepSpeed in their pickles, which are made up here for as long as they are pickled.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]  # fp32, exp_avg, ... of one parameter
SCALER, CONFIG = "deepspeed.runtime.fp16.loss_scaler", "deepspeed.runtime.zero.config"
GROUPS: list[dict[str, Any]] = [
    {
        "lr": 0.25,
        "betas": (0.5, 0.75),
        "eps": 1e-8,
        "weight_decay": 0.125,
        "amsgrad": False,
        "foreach": None,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
        "params": [0],
    }
]


class LossScaler:
    """As DeepSpeed's: a class with attributes."""

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False


class DynamicLossScaler(LossScaler):
    """As DeepSpeed's."""


class ZeroStageEnum(enum.IntEnum):
    """As DeepSpeed's."""

    gradients = 2
    weights = 3


@contextmanager
def deepspeed_names() -> Iterator[None]:
    """Let the classes above be pickled under the names that DeepSpeed has them by."""
    places = {LossScaler: SCALER, DynamicLossScaler: SCALER, ZeroStageEnum: CONFIG}
    parents = {name.rsplit(".", n)[0] for name in (SCALER, CONFIG) for n in range(4)}
    modules = {name: ModuleType(name) for name in parents}
    before = {cls: cls.__module__ for cls in places}
    for cls, place in places.items():
        setattr(modules[place], cls.__name__, cls)
        cls.__module__ = place
    try:
        with mock.patch.dict(sys.modules, modules):
            yield
    finally:
        for cls, name in before.items():
            cls.__module__ = name


def put(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with deepspeed_names():
        torch.save(value, file)


def as_stage_2(
    folder: Path,
    params: Mapping[str, Parts],
    *,
    step: Any = 2,
    groups: Sequence[Mapping[str, Any]] = GROUPS,
    scaler: LossScaler | None = None,
    states: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint "u" in `folder`, as it is made of stages 1 and 2. `step=None`: no step files."""
    root = folder / "u"
    for name, parts in params.items():
        for key, value in parts.items():
            put(root / "zero" / name / f"{key}.pt", {"cat_dim": 0, "param": value})
        if step is not None and len(parts) > 1:
            put(root / "zero" / name / "step.pt", step)
    put(
        root / "zero" / "optimizer_state.pt",
        {
            "loss_scaler": scaler or LossScaler(1.0),
            "dynamic_loss_scale": isinstance(scaler, DynamicLossScaler),
            "overflow": False,
            "clip_grad": 0.0,
            "zero_stage": ZeroStageEnum.gradients,
            "group_paddings": [0],
            "partition_count": [2],
            "ds_version": "0.19.8",
            "param_groups": list(groups),
        },
    )
    put(root / "mp_rank_00_model_states.pt", _states(params, states or {}))
    (folder / "latest_universal").write_text("u")
    return root


def as_stage_3(
    folder: Path,
    params: Mapping[str, Parts],
    *,
    step: Any = 2.0,
    frozen: Mapping[str, Tensor] | None = None,
    ranks: int = 2,
) -> Path:
    """A checkpoint "u" in `folder`, as it is made of stage 3: flat; frozen ones in parts."""
    root = folder / "u"
    for name, parts in params.items():
        for key, value in parts.items():
            put(root / "zero" / name / f"{key}.pt", value.reshape(-1).requires_grad_())
    inner = {"state": {0: {"step": torch.tensor(step)}}, "param_groups": list(GROUPS)}
    put(
        root / "zero" / "optimizer_state.pt",
        {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(1.0),
            "dynamic_loss_scale": False,
            "partition_count": ranks,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [torch.zeros(3)],
            "param_groups": list(GROUPS),
        },
    )
    for rank in range(ranks):
        parts = {}
        for name, value in (frozen or {}).items():
            length = -(-value.numel() // ranks)
            padded = torch.cat([value.reshape(-1), torch.full((length,), torch.nan)])
            parts[name] = padded[rank * length : (rank + 1) * length].clone()
        shapes = {name: value.shape for name, value in (frozen or {}).items()}
        more = {"frozen_param_fragments": parts, "frozen_param_shapes": OrderedDict(shapes)}
        put(root / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", _states(params, more))
    (folder / "latest_universal").write_text("u")
    return root


def _states(params: Mapping[str, Parts], more: Mapping[str, Any]) -> dict[str, Any]:
    shapes = OrderedDict((name, parts["fp32"].shape) for name, parts in params.items())
    return {
        "module": OrderedDict(),
        "param_shapes": [shapes],
        "global_steps": 3,
        "skipped_steps": 1,
        "ds_config": {"zero_optimization": {"stage": 2}},
        **more,
    }


def adam(**values: Tensor) -> dict[str, Parts]:
    """Parameters with moments that are not alike; a dot in a name is written as two underscores."""
    return {
        name.replace("__", "."): {
            "fp32": value,
            "exp_avg": value + 0.5,
            "exp_avg_sq": value.abs() + 2.0,
        }
        for name, value in values.items()
    }
