"""Checks of the arguments of `fzero.plan`, before anything runs."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from fzero.errors import AxisError, LayoutError
from fzero.errors.check import is_count
from fzero.tools.plan._config import from_config
from fzero.tools.plan._record import Plan

World = int | tuple[int, int]
"""W, or (R, S): R replicas of S ranks."""


def size_of(world: Any) -> int:
    """Return the number of ranks of W, or of (R, S); raise `AxisError` for another value."""
    sizes = world if isinstance(world, tuple) else (1, world)
    good = len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    if not good:
        raise AxisError(
            f"plan: world={world!r}.",
            cause="a number of ranks that is no positive integer, or a mesh of other dims.",
            fix="give W, or (R, S) for R replicas of S ranks: world=1024, world=(8, 128).",
        )
    return sizes[0] * sizes[1]


def module_of(model: Any) -> nn.Module:
    """Return the module to plan, built from a config if need be; `LayoutError` for other types."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, str | os.PathLike | dict) or hasattr(model, "model_type"):
        return from_config(model)
    raise LayoutError(
        f"plan was given a {type(model).__name__}.",
        cause="parameters, a class of modules, or a step in the place of a model.",
        fix="give an nn.Module (it may be on the meta device) or the config.json of one; "
        "fzero.plan.of_step(step, params, optimizer, *args, world=...) plans a step.",
    )


def check_rank(rank: Any, size: int) -> None:
    """Raise `AxisError` for a rank that is not among `size`."""
    if not is_count(rank, 0) or rank >= size:
        raise AxisError(
            f"plan: rank={rank!r} of {size}.",
            cause="ranks are counted from 0.",
            fix=f"give a rank in range({size}).",
        )


def too_large(plan: Plan, fits_bytes: float) -> LayoutError:
    """Return the error of a search in which no world was large enough."""
    seen = "a peak that is not known"
    if plan.peak_bytes is not None:
        seen = f"a peak of {plan.peak_bytes:,} bytes"
    most = max(plan.peak, key=lambda kind: plan.peak[kind])
    return LayoutError(
        f"plan.smallest_world: {seen} on {plan.world:,} ranks, and {fits_bytes:,.0f} fit.",
        cause=f"what does not shrink with the number of ranks; most of it is {most!r}.",
        fix="use a higher stage, a smaller batch, micro_batches, activation checkpoints in "
        "the model, or donate=True.",
    )
