"""The options of a state as a record, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import optree
import torch

from fzero.errors import LayoutError
from fzero.options import BUCKET_BYTES, OPTIONS, check_values
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, Gathering, OptimizerOver, Reduction
from fzero.state.offload import Offload
from fzero.state.precision import Autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """The options that both drivers share, as a record that a state is planned from."""

    optimizer_over: OptimizerOver = "shard"
    bucket_bytes: int | None = None
    persistence_threshold_numel: int = 0
    autocast: Autocast | torch.dtype | None = None
    offload: Offload | None = None
    reduction: Reduction
    gathering: Gathering


def grouped(kind: type, given: Mapping[str, Any], **more: Any) -> Any:
    """Build an options record of this kind from keyword options."""
    return kind(
        reduction=Reduction(**given_of(Reduction, given)),
        gathering=Gathering(**given_of(Gathering, given)),
        **given_of(kind, given),
        **more,
    )


def given_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword options that are fields of a record."""
    return {name: given[name] for name in field_names(kind) if name in given}


def field_names(kind: type) -> list[str]:
    """Return the names of the fields of a record that a user may give."""
    return [one.name for one in fields(kind) if one.metadata.get("given", True)]


def check_shared(options: SharedOptions) -> SharedOptions:
    """Return the options; raise `LayoutError`, naming the option, for a value out of range."""
    check_values(options)
    reduction = options.reduction
    if reduction.quantized_gradients:
        _require_alone("communication_dtype", reduction.communication_dtype, None)
        _require_alone("gradient_predivide_factor", reduction.gradient_predivide_factor, 1)
    return options


def check_stage(stage: Any, name: str = "Engine") -> int:
    """Return `stage` if it is 0, 1, 2 or 3; raise `LayoutError`, of the call `name`, otherwise."""
    OPTIONS["stage"].require(stage, f"{name}: ")
    return stage


def check_stages(name: str, stage: Any) -> Any:
    """Return `stage` if it is a stage or a pytree of them; raise `LayoutError` otherwise."""
    if optree.tree_is_leaf(stage, none_is_leaf=True, namespace=NAMESPACE) or not stage:
        return check_stage(stage, name)
    return optree.tree_map(
        lambda one: check_stage(one, name), stage, none_is_leaf=True, namespace=NAMESPACE
    )


def bucket_at(stage: int, bucket_bytes: int | None) -> int | None:
    """Return the bucket of a stage; None at stage 3, where leaves cross ranks unit by unit."""
    usual = BUCKET_BYTES.get(stage)
    return usual and (bucket_bytes or usual)


def _require_alone(name: str, value: Any, neutral: Any) -> None:
    if value != neutral:
        raise LayoutError(
            f"{name}={value!r} with quantized_gradients=True.",
            cause="two options for what is on the wire: quantized gradients are int8 with a "
            "scale for each block, so they neither overflow nor have another dtype.",
            fix="leave one of them out.",
        )


def check_quantized(
    stage: int, axis: Axis, reduction: Reduction, gathering: Gathering
) -> Reduction:
    """Return `reduction`; raise `LayoutError` if this stage never sends what is to be quantized."""
    if gathering.quantized_weights and stage != 3:
        raise LayoutError(
            f"quantized_weights=True at stage {stage}.",
            cause="only stage 3 gathers parameters for a forward or a backward; what stages 1 "
            "and 2 gather after an update is the parameters themselves.",
            fix="use stage=3, or leave it out.",
        )
    if reduction.quantized_gradients and stage == 0:
        raise LayoutError(
            "quantized_gradients=True at stage 0.",
            cause="stage 0 keeps the whole gradient on every rank, so the sums would have to "
            "be quantized again to be gathered.",
            fix="use stage 1, 2 or 3, which scatter them, or leave it out.",
        )
    if reduction.quantized_gradients and axis.dims is not None:
        raise LayoutError(
            f"quantized_gradients=True on {axis}, a mesh of two dims.",
            cause="the residual is one rank's; here the sums of several ranks would be rounded "
            "again, across the replicas.",
            fix="use a mesh of one dim, or leave it out; quantized_weights work on both.",
        )
    return reduction
