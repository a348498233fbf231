"""`init`: full parameters and an optimizer -> a train state, each rank keeping only its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fzero.collectives import assert_same_everywhere, broadcast_from_first, told_everywhere
from fzero.errors import LayoutError, explain
from fzero.mesh import Axis, axis_of
from fzero.optim import as_optimizer
from fzero.partition import flatten, plan_layout, shard_rows, unit_of
from fzero.state import (
    Buffers,
    Gathering,
    Placement,
    Progress,
    Reduction,
    Reshard,
    Setup,
    TrainState,
)
from fzero.state.window import CLOSED
from fzero.transforms._modes import in_transform, require_autograd

BUCKET_BYTES = 4 * 2**20
"""Default bucket of stages 0 to 2: large enough that latency does not count on gloo, small
enough that a large layer is a bucket of its own and is never copied (see benchmarks/)."""


def init(
    params: Any,
    optimizer: Any,
    *,
    stage: int,
    mesh: DeviceMesh | Axis | None = None,
    reshard_after_forward: Reshard = True,
    units: Callable[[str], str] = unit_of,
    trainable: Callable[[str], bool] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    ordered: bool = False,
) -> TrainState:
    """Return a train state for `params`, partitioned as `stage` says.

    (Stage 1 is stage 2: a gradient that is reduce-scattered costs less on the wire than one that is
    kept whole, and less memory.) Elements a rank holds, for P parameters and K optimizer slots, over W ranks:

        stage   parameters   gradients   optimizer
        0       P            P           K P
        1       P            P / W       K P / W
        2       P            P / W       K P / W
        3       P / W        P / W       K P / W

    The values are rank 0's on every rank, as when DDP is built; `params` is copied, not kept.
    (Inside a torch.func transform they stay each rank's own, and differentiable by `params`.)

    optimizer: from `fzero.optim`, or any (init, update) pair.
    mesh: a one-dim DeviceMesh; default the world (what torchrun started; else one rank).
    reshard_after_forward: stage 3 only. True: the full values of a unit go when another unit is
        used, and are gathered again in backward. False: they stay until the backward is over.
        "window": they stay over a coalescing window.
    units: path -> name of the stage-3 unit it is gathered with.
    trainable: path -> whether it learns; on top of the rule in `fzero.partition.plan_layout`.
    bucket_bytes: stages 0 to 2, the size up to which leaves share a collective.
    ordered: sum in rank order everywhere: bits then do not depend on the bucketing.

    Raises `LayoutError` for bad options and for parameters that are no tensors (by path);
    `AxisError` when the ranks disagree about the layout (the first rank and line that differ).

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.

    Example:
        >>> import torch, fzero
        >>> state = init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=2)
        >>> state.stage, fzero.full_params(state)["w"]
        (2, tensor([1., 1., 1., 1.]))
    """
    require_autograd("init")
    check_flags(ordered=ordered)
    reshard = check_reshard(reshard_after_forward)
    stage = check_stage(stage)
    _check_bucket(bucket_bytes)
    axis = axis_of(mesh)
    what = "the layout of the parameters"
    with told_everywhere(axis, what=what):
        layout = plan_layout(
            params,
            ranks=axis.size,
            bucket_bytes=None if stage == 3 else bucket_bytes,
            unit=units,
            trainable=trainable,
        )
        chosen = as_optimizer(optimizer)
        setup = Setup(
            stage=stage,
            axis=axis,
            layout=layout,
            optimizer=chosen,
            reduction=Reduction(ordered=ordered),
            gathering=Gathering(reshard_after_forward=reshard),
        )
        facts = [f"stage {stage}, {setup.reduction}, {setup.gathering}"]
        facts += [*chosen.describe(layout.leaves), *layout.describe()]
    assert_same_everywhere(facts, axis, what=what)
    return _state(setup, params)


def _state(setup: Setup, params: Any) -> TrainState:
    layout, axis = setup.layout, setup.axis
    fulls = [flat.clone() for flat in flatten(layout, params)]
    if not in_transform():  # inside one, the state goes on depending on `params`
        fulls = broadcast_from_first([full.detach() for full in fulls], axis)
    rows = [shard_rows(full, axis.size, axis.rank).clone() for full in fulls]
    held = rows if setup.params is Placement.SHARDED else fulls
    stepped = rows if setup.optimizer_state is Placement.SHARDED else fulls
    optimizer = setup.optimizer.init([stepped[i] for i in layout.trainable])
    return TrainState(
        params=Buffers(flats=tuple(held), placement=setup.params),
        gradients=Buffers(),
        optimizer=optimizer,
        window=CLOSED,
        step=torch.zeros((), dtype=torch.int64),
        progress=Progress(),
        setup=setup,
    )


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


def check_flags(**flags: Any) -> None:
    """Raise `LayoutError` for what is neither True nor False: "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise LayoutError(
                explain(
                    f"{name}={value!r}.",
                    cause="a word from a config file or a command line.",
                    fix="pass True or False.",
                )
            )


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


def _check_bucket(bucket_bytes: Any) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise LayoutError(
            explain(
                f"bucket_bytes={bucket_bytes!r}.",
                cause="a size that is no positive integer.",
                fix=f"give bytes, e.g. the default {BUCKET_BYTES}.",
            )
        )
