"""The options that `init`, `shard` and engines share, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import optree
import torch

from fzero._check import check_flags, is_count, is_positive, require
from fzero.errors import LayoutError, explain
from fzero.mesh import Axis, MeshLike
from fzero.partition import unit_of
from fzero.state import NAMESPACE, Gathering, OptimizerOver, ReduceOp, Reduction, Reshard

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


class Chosen(NamedTuple):
    """What `InitOptions` say, checked, with defaults in the place of what is not given."""

    mesh: MeshLike
    optimizer_over: OptimizerOver
    units: Callable[[str], str]
    trainable: Callable[[str], bool] | None
    bucket_bytes: int | None
    reduction: Reduction
    gathering: Gathering


def check_options(
    *,
    mesh: MeshLike = None,
    optimizer_over: OptimizerOver = "shard",
    reshard_after_forward: Reshard = True,
    units: Callable[[str], str] = unit_of,
    trainable: Callable[[str], bool] | None = None,
    bucket_bytes: int | None = None,
    quantized_weights: bool = False,
    **reducing: Any,
) -> Chosen:
    """Return `InitOptions` as they are used; raise `LayoutError`, naming the option, if wrong.

    Raises `TypeError` for an option that does not exist.
    """
    check_flags(quantized_weights=quantized_weights)
    return Chosen(
        mesh=mesh,
        optimizer_over=check_optimizer_over(optimizer_over),
        units=units,
        trainable=trainable,
        bucket_bytes=check_bucket(bucket_bytes),
        reduction=check_reduction(Reduction(**reducing)),
        gathering=Gathering(
            reshard_after_forward=check_reshard(reshard_after_forward),
            quantized_weights=quantized_weights,
        ),
    )


def check_stage(stage: Any) -> int:
    """Return `stage` if it is 0, 1, 2 or 3; raise `LayoutError` otherwise."""
    require(
        "stage",
        stage,
        lambda x: is_count(x, 0) and x <= 3,
        "0 (replicas), 1 (+ optimizer sharded), 2 (+ gradients) or 3 (+ parameters)",
        cause="a ZeRO stage that does not exist.",
    )
    return stage


def check_stages(stage: Any) -> Any:
    """Return `stage` if it is a stage or a pytree of them; raise `LayoutError` otherwise."""
    if optree.tree_is_leaf(stage, none_is_leaf=True, namespace=NAMESPACE) or not stage:
        return check_stage(stage)
    return optree.tree_map(check_stage, stage, none_is_leaf=True, namespace=NAMESPACE)


def check_reshard(reshard: Any) -> Reshard:
    """Return `reshard` if it is True, False or "window"; raise `LayoutError` otherwise."""
    require(
        "reshard_after_forward",
        reshard,
        lambda x: x is True or x is False or x == "window",
        'True (gather again in backward), False (keep until then) or "window"',
    )
    return reshard


def check_optimizer_over(ranks: Any) -> OptimizerOver:
    """Return `ranks` if it is "shard" or "all"; raise `LayoutError` otherwise."""
    require(
        "optimizer_over",
        ranks,
        lambda x: x in ("shard", "all"),
        '"shard" (the ranks of one replica share masters and optimizer states) or "all" (all '
        "ranks of the mesh do)",
    )
    return ranks


def check_bucket(bucket_bytes: Any) -> int | None:
    """Return a size in bytes, or None; raise `LayoutError` for what is no positive integer."""
    usual = ", ".join(f"{size} at stage {stage}" for stage, size in BUCKET_BYTES.items())
    wanted = f"bytes, or None for the default ({usual})"
    require("bucket_bytes", bucket_bytes, lambda x: x is None or is_count(x), wanted)
    return bucket_bytes


def bucket_at(stage: int, bucket_bytes: int | None) -> int | None:
    """Return the bucket of a stage; None at stage 3, where leaves cross ranks unit by unit."""
    usual = BUCKET_BYTES.get(stage)
    return usual and (bucket_bytes or usual)


def check_reduction(reduction: Reduction) -> Reduction:
    """Return how gradients are to cross ranks; raise `LayoutError`, naming the option, if wrong."""
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
    return reduction


def _require_alone(name: str, value: Any, neutral: Any) -> None:
    if value != neutral:
        raise LayoutError(
            explain(
                f"{name}={value!r} with quantized_gradients=True.",
                cause="two options for what is on the wire: quantized gradients are int8 with a "
                "scale for each block, so they neither overflow nor have another dtype.",
                fix="leave one of them out.",
            )
        )


def check_quantized(
    stage: int, axis: Axis, reduction: Reduction, gathering: Gathering
) -> Reduction:
    """Return `reduction`; raise `LayoutError` if this stage sends nothing of what is quantized."""
    if gathering.quantized_weights and stage != 3:
        raise LayoutError(
            explain(
                f"quantized_weights=True at stage {stage}.",
                cause="only stage 3 gathers parameters for a forward or a backward; what stages 1 "
                "and 2 gather after an update is the parameters themselves.",
                fix="use stage=3, or leave it out.",
            )
        )
    if reduction.quantized_gradients and stage == 0:
        raise LayoutError(
            explain(
                "quantized_gradients=True at stage 0.",
                cause="stage 0 keeps the whole gradient on every rank, so the sums would have to "
                "be quantized again to be gathered.",
                fix="use stage 1, 2 or 3, which scatter them, or leave it out.",
            )
        )
    if reduction.quantized_gradients and axis.dims is not None:
        raise LayoutError(
            explain(
                f"quantized_gradients=True on {axis}, a mesh of two dims.",
                cause="the residual is one rank's; here the sums of several ranks would be rounded "
                "again, across the replicas.",
                fix="use a mesh of one dim, or leave it out; quantized_weights work on both.",
            )
        )
    return reduction
