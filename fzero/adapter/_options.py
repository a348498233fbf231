"""The options of an engine: checked where they are given, before anything is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch

from fzero.errors import LayoutError, explain
from fzero.state.leaf_modules import LeafSpec
from fzero.state.units import Limits
from fzero.transforms.init import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How gradients cross ranks."""

    bucket_bytes: int = BUCKET_BYTES
    contiguous_gradients: bool = False
    overlap: bool = True
    ordered: bool = False
    accumulate_dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updating:
    """What `step` does with gradients."""

    master_weights: bool = True
    max_norm: float | None = None
    gradient_accumulation_steps: int = 1
    average_micro_batches: bool = False
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """How stage 3 gets full parameters."""

    leaf_modules: LeafSpec | None = None
    lockstep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `Engine(...)` takes besides the module, the optimizer, the stage and the mesh."""

    reduction: Reduction
    updating: Updating
    gathering: Gathering
    limits: Limits


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PARTS = {"reduction": Reduction, "updating": Updating, "gathering": Gathering, "limits": Limits}
_DEFAULTS = {"persistence_threshold_numel": 0}
"""A stage 3 that shards is what is asked for: nothing persists unless a threshold is given."""


def make_options(given: Mapping[str, Any]) -> Options:
    """Return the options that `given` says, defaults for the others.

    Raises `LayoutError` for an unknown name (with what comes near) or a value out of range.

    Example:
        >>> make_options({"max_norm": 1.0}).updating.max_norm
        1.0
        >>> make_options({"max_nrom": 1.0})
        Traceback (most recent call last):
        fzero.errors.LayoutError: unknown option 'max_nrom' (near: max_norm)...
    """
    known = {part: [field.name for field in fields(kind)] for part, kind in _PARTS.items()}
    names = sorted(name for of_part in known.values() for name in of_part)
    for name in given:
        if name not in names:
            near = ", ".join(get_close_matches(name, names, n=3)) or "nothing"
            raise LayoutError(
                explain(
                    f"unknown option {name!r} (near: {near}).",
                    cause="a misspelt option, or one of another library.",
                    fix=f"use one of {names}.",
                )
            )
    chosen = {**_DEFAULTS, **given}
    parts: dict[str, Any] = {
        part: kind(**{name: chosen[name] for name in known[part] if name in chosen})
        for part, kind in _PARTS.items()
    }
    options = Options(**parts)
    _check_reduction(options.reduction)
    _check_updating(options.updating)
    _check_gathering(options.gathering)
    return options


def _check_reduction(given: Reduction) -> None:
    _require("bucket_bytes", given.bucket_bytes, _is_count, "an int of 1 or more")
    for name in ("contiguous_gradients", "overlap", "ordered"):
        _require(name, getattr(given, name), _is_bool, "True or False")
    for name in ("accumulate_dtype", "communication_dtype"):
        value = getattr(given, name)
        _require(name, value, lambda x: x is None or x in _DTYPES, f"None or one of {_DTYPES}")


def _check_updating(given: Updating) -> None:
    for name in ("master_weights", "average_micro_batches"):
        _require(name, getattr(given, name), _is_bool, "True or False")
    steps = given.gradient_accumulation_steps
    _require("gradient_accumulation_steps", steps, _is_count, "an int of 1 or more")
    _require("loss_scale", given.loss_scale, _is_positive, "a positive number")
    if given.max_norm is not None:
        _require("max_norm", given.max_norm, _is_positive, "a positive number, or None for off")


def _check_gathering(given: Gathering) -> None:
    _require("lockstep", given.lockstep, _is_bool, "True or False")
    leaves = given.leaf_modules
    wanted = "a fzero.adapter.LeafSpec(classes=..., names=..., name_suffixes=...)"
    _require("leaf_modules", leaves, lambda x: x is None or isinstance(x, LeafSpec), wanted)


def _require(name: str, value: Any, good: Any, wanted: str) -> None:
    if not good(value):
        raise LayoutError(
            explain(
                f"{name}={value!r}.",
                cause="a value of another kind or out of range.",
                fix=f"give {wanted}.",
            )
        )


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
