"""What an engine does with gradients at an update: checked where it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero._check import check_flags, is_count, is_positive, require
from fzero.state import Gathering, Reduction
from fzero.state.leaf_modules import LeafSpec
from fzero.state.scale import as_policy
from fzero.transforms._options import (
    SharedOptions,
    check_shared,
    given_of,
    grouped,
    names_of,
)
from fzero.transforms.scale_loss import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Updating:
    """What `step` does with gradients."""

    master_weights: bool = True
    state_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    max_norm: float | None = None
    gradient_accumulation_steps: int = 1
    average_micro_batches: bool = False
    check_finite: bool = False
    loss_scale: Scale = None  # what `fzero.scale_loss` takes; None: what autocast needs, or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SharedOptions):
    """What `Engine(...)` takes besides the module, the optimizer, the stage and the mesh."""

    updating: Updating
    leaf_modules: LeafSpec | None


def options_of(given: Mapping[str, Any]) -> Options:
    """Return the options of `Engine(...)` in their groups, unchecked, of all that it was given.

    Raises `TypeError` for an option that does not exist.
    """
    kinds = Updating, Reduction, Gathering, Options
    names = {name for kind in kinds for name in names_of(kind)}
    unknown = set(given.get("options", ())) - names
    if unknown:
        raise TypeError(f"Engine() got an unexpected keyword argument {min(unknown)!r}")
    return grouped(Options, given, updating=Updating(**given_of(Updating, given)))


def compared(options: Options) -> str:
    """Return the options as ranks compare them: no address, no value of a tensor."""
    scale = as_policy("loss_scale", options.updating.loss_scale)
    return f"{replace(options, updating=replace(options.updating, loss_scale=scale))}"


def require_options(options: Options) -> None:
    """Raise `LayoutError`, naming the option, for a value out of range."""
    check_shared(options)
    updating = options.updating
    check_flags(
        master_weights=updating.master_weights,
        average_micro_batches=updating.average_micro_batches,
        check_finite=updating.check_finite,
    )
    steps = updating.gradient_accumulation_steps
    require("gradient_accumulation_steps", steps, is_count, "an int of 1 or more")
    as_policy("loss_scale", updating.loss_scale)
    if updating.max_norm is not None:
        require("max_norm", updating.max_norm, is_positive, "a positive number, or None for off")
    wanted = "a fzero.adapter.LeafSpec(classes=..., names=..., name_suffixes=...)"
    leaves = options.leaf_modules
    require("leaf_modules", leaves, lambda x: x is None or isinstance(x, LeafSpec), wanted)
