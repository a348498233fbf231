"""fzero's stages 0 to 3, through the public API alone."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fzero
from step.contestants import ADAMW, Contestant, Setup, Step
from step.models import Batch, Task

AWAY = {2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "params")}
"""What lives on disk where the name says so."""

LOWERED = (nn.Linear, nn.Embedding, nn.LayerNorm)
"""Modules whose parameters cross ranks in bf16 where the name ends in `_bf16_all`: all of them, as
FSDP2's policy has it. By default an embedding and a norm cross in fp32."""

Reshard = bool | Literal["window"]


def build(
    setup: Setup,
    *,
    stage: int,
    coalesce: bool = False,
    reshard_after_forward: Reshard = True,
    dtype: torch.dtype = torch.float32,
    safe: Sequence[type[nn.Module]] | None = None,
    away: Sequence[str] = (),
    compiled: bool = False,
    logical: bool = False,
) -> Step:
    """One donated, sharded step, computed in `dtype`; the parts of the state in `away` on disk.

    Parameters of the modules that are `safe` cross ranks in `dtype`; None is fzero's default. With
    `logical` each batch of each rank is that of a logical rank, in one call.
    """
    apply, params = fzero.functionalize(setup.task.module())
    shares = 1 if logical else setup.task.backwards

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return apply(params, *batch) / shares

    def step_fn(state: Any, batches: list[Batch]) -> tuple[Any, Tensor]:
        losses = []
        for batch in batches:
            state, loss = fzero.grad_and_reduce(loss_fn, state)(batch)
            losses.append(loss)
        return fzero.apply_gradients(state), torch.stack(losses).sum()

    on_disk: dict[str, Any] = dict.fromkeys(away, "disk")
    low = fzero.autocast(step_fn, dtype=dtype, lower_precision_safe_modules=safe)
    low = fzero.offload(low, **on_disk, folder=tempfile.gettempdir())
    inner = fzero.coalesce(low, backwards=setup.task.backwards) if coalesce else low
    places: dict[str, Any] = {}
    if logical:
        places = {"logical_ranks": setup.mesh.size() * setup.task.backwards}
    train_step = fzero.shard(
        inner, stage=stage, donate=True, reshard_after_forward=reshard_after_forward, **places
    )
    train_step = fzero.compile(train_step) if compiled else train_step
    options = {key: ADAMW[key] for key in ("betas", "eps", "weight_decay")}
    held = [train_step.init(params, fzero.optim.adamw(ADAMW["lr"], **options))]

    def step(batches: list[Batch]) -> Tensor:
        if logical:
            batches = [batches[0] if len(batches) == 1 else _joined(batches)]
        held[0], loss = train_step(held[0], batches)
        return loss

    return step


def _joined(batches: list[Batch]) -> Batch:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def fzero_contestants(task: Task) -> list[Contestant]:
    """Every stage, kept or gathered again at stage 3; for N > 1 also coalesced."""
    rows = _in_a_window() if task.backwards > 1 else _at_once()
    return [
        Contestant(name=name, stage=stage, once=once, build=partial(build, **options))
        for name, stage, once, options in rows
    ]


Row = tuple[str, str, bool, dict[str, Any]]  # name, stage, whether it reduces once, options


def _at_once() -> list[Row]:
    rows: list[Row] = []
    for stage in range(4):
        at = {"stage": stage}
        rows.append((f"fzero{stage}", str(stage), True, at))
        rows.append((f"fzero{stage}_logical", str(stage), True, at | {"logical": True}))
        if stage in AWAY:
            rows.append((f"fzero{stage}_disk", str(stage), True, at | {"away": AWAY[stage]}))
            low = at | {"dtype": torch.bfloat16}
            rows.append((f"fzero{stage}_bf16", f"{stage} bf16", True, low))
            every = low | {"safe": LOWERED}
            rows.append((f"fzero{stage}_bf16_all", f"{stage} bf16", True, every))
        if stage != 1:
            rows.append((f"fzero{stage}_compiled", str(stage), True, at | {"compiled": True}))
    kept = {"stage": 3, "reshard_after_forward": False}
    return [*rows, ("fzero3_keep", "3 keep", True, kept)]


def _in_a_window() -> list[Row]:
    rows: list[Row] = []
    for stage in range(4):
        rows.append((f"fzero{stage}", str(stage), False, {"stage": stage}))
        coalesced = {"stage": stage, "coalesce": True}
        rows.append((f"fzero{stage}_coal", str(stage), True, coalesced))
        logical = {"stage": stage, "logical": True}
        rows.append((f"fzero{stage}_logical", str(stage), True, logical))
    kept = {"stage": 3, "reshard_after_forward": False}
    window = {"stage": 3, "coalesce": True, "reshard_after_forward": "window"}
    rows.append(("fzero3_keep", "3 keep", False, kept))
    return [*rows, ("fzero3_keep_coal", "3 keep", True, window)]
