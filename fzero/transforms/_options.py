"""The options that `init` and `shard` share, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import optree

from fzero.errors import LayoutError, explain
from fzero.mesh import MeshLike
from fzero.state import NAMESPACE, OptimizerOver, Reshard

Stages = int | dict[str, Any] | list[Any] | tuple[Any, ...]
"""A ZeRO stage, or a pytree of stages: one for each model."""

BUCKET_BYTES = 4 * 2**20
"""Default bucket of stages 0 to 2: large enough that latency does not count on gloo, small
enough that a large layer is a bucket of its own and is never copied (see benchmarks/)."""


class InitOptions(TypedDict, total=False):
    """The keywords that `init` and `shard` share; see `init`."""

    mesh: MeshLike
    optimizer_over: OptimizerOver
    reshard_after_forward: Reshard
    units: Callable[[str], str]
    trainable: Callable[[str], bool] | None
    bucket_bytes: int
    ordered: bool


def check_stage(stage: Any) -> int:
    """Return `stage` if it is 0, 1, 2 or 3; raise `LayoutError` otherwise."""
    if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3:
        return stage
    raise LayoutError(
        explain(
            f"stage={stage!r}.",
            cause="a ZeRO stage that does not exist.",
            fix="use 0 (replicas), 1 (+ optimizer sharded), 2 (+ gradients) or 3 (+ parameters).",
        )
    )


def check_stages(stage: Any) -> Any:
    """Return `stage` if it is a stage or a pytree of them; raise `LayoutError` otherwise."""
    if optree.tree_is_leaf(stage, none_is_leaf=True, namespace=NAMESPACE) or not stage:
        return check_stage(stage)
    return optree.tree_map(check_stage, stage, none_is_leaf=True, namespace=NAMESPACE)


def check_flags(**flags: Any) -> dict[str, bool]:
    """Return the flags; raise `LayoutError` for what is no bool: "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise LayoutError(
                explain(
                    f"{name}={value!r}.",
                    cause="a word from a config file or a command line.",
                    fix="pass True or False.",
                )
            )
    return flags


def check_reshard(reshard: Any) -> Reshard:
    """Return `reshard` if it is True, False or "window"; raise `LayoutError` otherwise."""
    if reshard is True or reshard is False or reshard == "window":
        return reshard
    raise LayoutError(
        explain(
            f"reshard_after_forward={reshard!r}.",
            cause="a mistyped option.",
            fix='use True (gather again in backward), False (keep until then) or "window".',
        )
    )


def check_optimizer_over(ranks: Any) -> OptimizerOver:
    """Return `ranks` if it is "shard" or "all"; raise `LayoutError` otherwise."""
    if ranks == "shard" or ranks == "all":
        return ranks
    raise LayoutError(
        explain(
            f"optimizer_over={ranks!r}.",
            cause="a mistyped option, or the name of another mesh dim.",
            fix='use "shard" (the ranks of one replica share masters and optimizer states) or '
            '"all" (all ranks of the mesh do).',
        )
    )


def check_bucket(bucket_bytes: Any) -> int:
    """Return a size in bytes; raise `LayoutError` for what is no positive integer."""
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise LayoutError(
            explain(
                f"bucket_bytes={bucket_bytes!r}.",
                cause="a size that is no positive integer.",
                fix=f"give bytes, e.g. the default {BUCKET_BYTES}.",
            )
        )
    return bucket_bytes
