"""From the values of a config to the options of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fzero.adapter.deepspeed._batch import Batch
from fzero.adapter.deepspeed._precision import autocast_of, dtypes_of, loss_scale
from fzero.adapter.deepspeed._read import config_error, options_of
from fzero.adapter.deepspeed._zero_keys import MOE_CLASSES
from fzero.state.leaf_modules import LeafSpec, class_name

_ZERO = "zero_optimization."


def engine_options(
    given: Mapping[str, Any], values: Mapping[str, Any], model: nn.Module, batch: Batch
) -> dict[str, Any]:
    """Return the options of `Engine`; raise `LayoutError` for keys that contradict each other."""
    return {
        **options_of(values),
        "stage": values[_ZERO + "stage"],
        **dtypes_of(values, model),
        **_accumulation(values, batch.steps),
        "loss_scale": loss_scale(given, values),
        "autocast": autocast_of(given, values),
        "leaf_modules": _leaf_modules(values, model),
        "reshard_after_forward": not _fits_whole(values, model),
    }


def _accumulation(values: Mapping[str, Any], given: int | None) -> dict[str, Any]:
    """How many micro-batches an update has; `given`: what the config says."""
    managed = values["managed_gradient_accumulation"]
    count = given or 1
    if not managed and count > 1:
        raise config_error(
            f"config: gradient_accumulation_steps = {count} with "
            "managed_gradient_accumulation = false.",
            cause="a number of micro-batches for an engine that takes as many as come.",
            fix="leave it out: gradients are then divided by the number of backwards before "
            "step(). Or give 1, and divide the losses yourself.",
        )
    return {
        "gradient_accumulation_steps": count,
        "average_micro_batches": count > 1 if managed else given is None,
    }


def _fits_whole(values: Mapping[str, Any], model: nn.Module) -> bool:
    """Whether gathered parameters may stay for the backward: DeepSpeed's two bounds allow it.

    The first parameters are used again after a forward and a backward of all the others.
    """
    numel = sum(p.numel() for p in model.parameters())
    live, reuse = (values[_ZERO + "stage3_max_" + k] for k in ("live_parameters", "reuse_distance"))
    return numel <= live and 2 * numel <= reuse


def _leaf_modules(values: Mapping[str, Any], model: nn.Module) -> LeafSpec:
    classes = values[_ZERO + "leaf_module.classes"]
    if classes is None:
        here = {class_name(cls) for part in model.modules() for cls in type(part).__mro__}
        classes = tuple(name for name in MOE_CLASSES if name in here)
    return LeafSpec(
        classes=classes,
        names=values[_ZERO + "leaf_module.names"] or (),
        name_suffixes=values[_ZERO + "leaf_module.name_suffixes"] or (),
        granularity_threshold_numel=values[_ZERO + "stage3_module_granularity_threshold"],
    )
