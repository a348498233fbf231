"""The options that `init`, `shard` and engines share, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import optree
import torch

from fzero._check import check_flags, is_count, is_positive, require, unknown_option
from fzero.errors import LayoutError
from fzero.mesh import Axis, MeshLike
from fzero.state import NAMESPACE, Gathering, OptimizerOver, ReduceOp, Reduction, Reshard
from fzero.state.offload import Offload
from fzero.state.precision import Autocast

Stages = int | dict[str, Any] | list[Any] | tuple[Any, ...]
"""A ZeRO stage, or a pytree of stages: one for each model."""

BUCKET_BYTES = {0: 8 * 2**20, 1: 4 * 2**20, 2: 4 * 2**20}
"""Default bucket of a stage: large enough that latency does not count on gloo. At stages 1 and 2
memory beyond this rank's part of the gradients is a few buckets, and a large layer is one of its
own, which is never copied; at stage 0 a bucket is summed where its gradients stay, so that a larger
one takes no more of it (see benchmarks/)."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Placing(TypedDict, total=False):
    mesh: MeshLike
    optimizer_over: OptimizerOver
    reshard_after_forward: Reshard
    units: Callable[[str], str]
    trainable: Callable[[str], bool] | None
    bucket_bytes: int | None
    whole_parameters: bool
    ordered: bool


class WireOptions(TypedDict, total=False):
    """The keywords that `init`, `shard` and `Engine` share; see `init`."""

    accumulate_dtype: torch.dtype | None
    communication_dtype: torch.dtype | None
    reduce_op: ReduceOp
    gradient_predivide_factor: float
    quantized_weights: bool
    quantized_gradients: bool


class InitOptions(_Placing, WireOptions, total=False):
    """The keywords that `init` and `shard` share; see `init`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """What functional steps and engines are told alike, as a state is planned by it."""

    optimizer_over: OptimizerOver = "shard"
    bucket_bytes: int | None = None
    whole_parameters: bool = False
    persistence_threshold_numel: int = 0
    autocast: Autocast | torch.dtype | None = None
    offload: Offload | None = None
    reduction: Reduction
    gathering: Gathering


def grouped(kind: type, given: Mapping[str, Any], **more: Any) -> Any:
    """Return the `SharedOptions` of this kind that all that was `given` by name makes."""
    return kind(
        reduction=Reduction(**given_of(Reduction, given)),
        gathering=Gathering(**given_of(Gathering, given)),
        **given_of(kind, given),
        **more,
    )


def given_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given of the fields of a record."""
    return {name: given[name] for name in names_of(kind) if name in given}


def names_of(kind: type) -> list[str]:
    """Return the names of the fields of a record that a user may give."""
    return [one.name for one in fields(kind) if one.metadata.get("given", True)]


def check_options(name: str, options: InitOptions, **more: Any) -> SharedOptions:
    """Return `InitOptions`, checked; `more` are those that transforms have of their own.

    Raises `LayoutError`, naming the option, for a wrong one, `CallError` for one that is not there.
    """
    known = {*InitOptions.__annotations__, *names_of(Reduction)}
    unknown = set(options) - known
    if unknown:
        raise unknown_option(name, min(unknown), {*known, "stage", *_OWN.get(name, ())})
    return check_shared(grouped(SharedOptions, {**options, **more}))


_OWN = {"init": ("autocast", "initializer", "offload"), "shard": ("donate",)}


def check_shared(options: SharedOptions) -> SharedOptions:
    """Return the options; raise `LayoutError`, naming the option, for a value out of range."""
    gathering = options.gathering
    _check_optimizer_over(options.optimizer_over)
    _check_bucket(options.bucket_bytes)
    _check_reduction(options.reduction)
    _check_reshard(gathering.reshard_after_forward)
    check_flags(
        quantized_weights=gathering.quantized_weights, whole_parameters=options.whole_parameters
    )
    numels = {
        "prefetch_numel": gathering.prefetch_numel,
        "persistence_threshold_numel": options.persistence_threshold_numel,
    }
    for name, value in numels.items():
        require(name, value, lambda x: is_count(x, 0), "a number of elements: an int of 0 or more")
    return options


def check_stage(stage: Any, name: str = "Engine") -> int:
    """Return `stage` if it is 0, 1, 2 or 3; raise `LayoutError`, of the call `name`, otherwise."""
    require(
        f"{name}: stage",
        stage,
        lambda x: is_count(x, 0) and x <= 3,
        "0 (replicas), 1 (+ optimizer sharded), 2 (+ gradients) or 3 (+ parameters)",
        cause="a ZeRO stage that does not exist.",
    )
    return stage


def check_stages(name: str, stage: Any) -> Any:
    """Return `stage` if it is a stage or a pytree of them; raise `LayoutError` otherwise."""
    if optree.tree_is_leaf(stage, none_is_leaf=True, namespace=NAMESPACE) or not stage:
        return check_stage(stage, name)
    return optree.tree_map(
        lambda one: check_stage(one, name), stage, none_is_leaf=True, namespace=NAMESPACE
    )


def _check_reshard(reshard: Any) -> None:
    require(
        "reshard_after_forward",
        reshard,
        lambda x: x is True or x is False or x == "window",
        'True (gather again in backward), False (keep until then) or "window"',
    )


def _check_optimizer_over(ranks: Any) -> None:
    require(
        "optimizer_over",
        ranks,
        lambda x: x in ("shard", "all"),
        '"shard" (the ranks of one replica share masters and optimizer states) or "all" (all '
        "ranks of the mesh do)",
    )


def _check_bucket(bucket_bytes: Any) -> None:
    usual = ", ".join(f"{size} at stage {stage}" for stage, size in BUCKET_BYTES.items())
    wanted = f"bytes, or None for the default ({usual})"
    require("bucket_bytes", bucket_bytes, lambda x: x is None or is_count(x), wanted)


def bucket_at(stage: int, bucket_bytes: int | None) -> int | None:
    """Return the bucket of a stage; None at stage 3, where leaves cross ranks unit by unit."""
    usual = BUCKET_BYTES.get(stage)
    return usual and (bucket_bytes or usual)


def _check_reduction(reduction: Reduction) -> None:
    check_flags(
        ordered=reduction.ordered,
        overlap=reduction.overlap,
        contiguous_gradients=reduction.contiguous_gradients,
        quantized_gradients=reduction.quantized_gradients,
    )
    for name in ("accumulate_dtype", "communication_dtype"):
        value = getattr(reduction, name)
        require(name, value, lambda x: x is None or x in _DTYPES, f"None or one of {_DTYPES}")
    op, factor = reduction.reduce_op, reduction.gradient_predivide_factor
    require("reduce_op", op, lambda x: x in ("mean", "sum"), '"mean" or "sum"')
    require("gradient_predivide_factor", factor, is_positive, "a positive number")
    if reduction.quantized_gradients:
        _require_alone("communication_dtype", reduction.communication_dtype, None)
        _require_alone("gradient_predivide_factor", factor, 1)


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
    """Return `reduction`; raise `LayoutError` if this stage sends nothing of what is quantized."""
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
