"""Convert the values of a config to the options of `Engine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fzero.errors import LayoutError
from fzero.integrations.deepspeed._batch import Batch
from fzero.integrations.deepspeed._precision import autocast_of, dtypes_of, loss_scale
from fzero.integrations.deepspeed._read import options_of
from fzero.integrations.deepspeed._zero_keys import MOE_CLASSES
from fzero.machine.codecs import cast, int8
from fzero.state.codec import Compress
from fzero.state.leaf_modules import LeafSpec, class_name
from fzero.state.offload import Offload

_ZERO = "zero_optimization."


def engine_options(
    values: Mapping[str, Any], model: nn.Module, batch: Batch
) -> tuple[dict[str, Any], list[LayoutError]]:
    """Return the options of `Engine`, and an error for each group of contradicting keys."""
    options = {
        **options_of(values),
        "stage": values[_ZERO + "stage"],
        "gradient_predivide_factor": values["gradient_predivide_factor"]
        if values["prescale_gradients"]
        else 1.0,
        "leaf_modules": _leaf_modules(values, model),
        "reshard_after_forward": not _fits_whole(values, model),
    }
    errors = []
    for part in (
        lambda: dtypes_of(values, model),
        lambda: _accumulation(values, batch.steps),
        lambda: {"loss_scale": loss_scale(values)},
        lambda: {"autocast": autocast_of(values)},
        lambda: {"offload": _offload(values)},
        lambda: {"compress": _compress(values)},
    ):
        try:
            options |= part()
        except LayoutError as error:
            errors.append(error)
    return options, errors


def _offload(values: Mapping[str, Any]) -> Offload:
    """Return what is offloaded: gradients go where the optimizer's states go, as in DeepSpeed."""
    sections = ("offload_optimizer", "offload_param")
    states, params = (values[f"{_ZERO}{name}.device"] for name in sections)
    if params is not None and values[_ZERO + "stage"] != 3:
        raise LayoutError(
            f"config: {_ZERO}offload_param at stage {values[_ZERO + 'stage']}.",
            cause="below stage 3 every rank computes with whole parameters of its own.",
            fix="use stage 3, or leave offload_param out.",
        )
    paths = {
        values[f"{_ZERO}{name}.nvme_path"]
        for name, home in zip(sections, (states, params), strict=True)
        if home == "disk"
    }
    if len(paths) > 1 or None in paths:
        raise LayoutError(
            f"config: nvme_path of {' and '.join(_ZERO + name for name in sections)}: {paths}.",
            cause="device = nvme without a path, or with two.",
            fix="give both sections the same nvme_path: a folder on a disk of each machine.",
        )
    folder = next(iter(paths), None)
    return Offload(optimizer=states, gradients=states, params=params, folder=folder)


def _compress(values: Mapping[str, Any]) -> Compress | None:
    """Return what crosses ranks encoded: in another dtype, or as ZeRO++'s int8 blocks."""
    dtype = values["communication_data_type"]
    weights, blocks = (values[f"{_ZERO}zero_quantized_{name}"] for name in ("weights", "gradients"))
    if dtype is not None and blocks:
        raise LayoutError(
            f"config: communication_data_type = {dtype} and {_ZERO}zero_quantized_gradients.",
            cause="two keys for what is on the wire.",
            fix="leave one of them out.",
        )
    gradients = int8() if blocks else None if dtype is None else cast(dtype)
    parameters = int8() if weights else None
    either = gradients is not None or parameters is not None
    return Compress(gradients=gradients, parameters=parameters) if either else None


def _accumulation(values: Mapping[str, Any], given: int | None) -> dict[str, Any]:
    """Return the options for micro-batches; `given`: gradient_accumulation_steps, if written."""
    managed = values["managed_gradient_accumulation"]
    count = given or 1
    return {
        "micro_batches": count,
        "average_micro_batches": count > 1 or not (managed or given),
    }


def _fits_whole(values: Mapping[str, Any], model: nn.Module) -> bool:
    """Return whether DeepSpeed's two bounds allow to keep gathered parameters for the backward.

    The first parameters are used again after a forward and a backward of all the others.
    """
    numel = sum(p.numel() for p in model.parameters())
    live, reuse = (values[_ZERO + "stage3_max_" + k] for k in ("live_parameters", "reuse_distance"))
    return numel <= live and 2 * numel <= reuse


def _leaf_modules(values: Mapping[str, Any], model: nn.Module) -> LeafSpec:
    """Return the leaf modules: named by the config, or marked by set_z3_leaf_modules."""
    marked = [name for name, part in model.named_modules() if getattr(part, "_z3_leaf", False)]
    classes = values[_ZERO + "leaf_module.classes"]
    if classes is None:
        here = {class_name(cls) for part in model.modules() for cls in type(part).__mro__}
        classes = tuple(name for name in MOE_CLASSES if name in here)
    return LeafSpec(
        classes=classes,
        names=(*(values[_ZERO + "leaf_module.names"] or ()), *marked),
        name_suffixes=values[_ZERO + "leaf_module.name_suffixes"] or (),
        granularity_threshold_numel=values[_ZERO + "stage3_module_granularity_threshold"],
    )
