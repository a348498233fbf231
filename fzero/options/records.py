"""The records of options: each option is a field of one of them, and is declared there alone.

`Reduction` and `Gathering` ride in the setup of a state and stand in `fzero.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from fzero.errors.check import is_count, is_positive
from fzero.ranks.mesh import MeshLike
from fzero.state import Gathering, Local, OptimizerOver, ReduceOp, Reduction, Reshard
from fzero.state.codec import Codec, Compress
from fzero.state.layout import LeafSpec
from fzero.state.points import FLAG, REQUIRED, ZERO, Points, ValueCheck, of_path, one_of, option
from fzero.state.scale import DynamicScale
from fzero.state.setup import Autocast, Offload

# The options as typed keywords, for `Unpack`. A test compares them with the table.

Stages = int | dict[str, Any] | list[Any] | tuple[Any, ...]
"""A ZeRO stage, or a pytree of stages: one for each model."""

Units = Callable[[str], str] | None
"""path -> name of its unit; None: what `fzero.machine.partition.unit_of` says."""

Trainable = Callable[[str], bool] | None
"""path -> whether it learns."""

Frozen = Codec | Callable[[str, Tensor], Codec | None] | None
"""A codec, or (path, leaf) -> the codec of a frozen leaf, or None to leave it as it is."""

Initializer = Callable[[str, Tensor], Tensor]
"""(path, leaf) -> its values."""

Own = Collection[str]
"""Paths of tensors of a module that each rank has for itself."""

StateDtype = Any
"""A dtype, a codec, {slot: codec}, or a `fzero.optim.Encoding`; None: that of what is stepped."""

Scale = float | Literal["dynamic"] | DynamicScale | Tensor | Callable[[], Any] | None
"""What `fzero.scale_loss` takes."""


class StateOptions(TypedDict, total=False):
    """What every driver takes: how a state is laid out, gathered and reduced."""

    mesh: MeshLike
    optimizer_over: OptimizerOver
    logical_ranks: int | None
    seed: int
    reshard_after_forward: Reshard
    prefetch_numel: int
    persistence_threshold_numel: int
    units: Units
    frozen: Frozen
    bucket_bytes: int | None
    ordered: bool
    overlap: bool
    contiguous_gradients: bool
    accumulate_dtype: torch.dtype | None
    reduce_op: ReduceOp
    gradient_predivide_factor: float


class StepOptions(StateOptions, total=False):
    """What `shard` takes beside the stage, and `plan`: both make a step of pure functions."""

    trainable: Trainable
    donate: bool


class _TransformOptions(StateOptions, total=False):
    """What drivers that make a state themselves take: steps have a transform for each."""

    autocast: Autocast | torch.dtype | None
    offload: Offload | None
    local: Local | None
    compress: Compress | None
    transforms: Sequence[Points]


class InitOptions(_TransformOptions, total=False):
    """What `init` takes beside the stage."""

    trainable: Trainable
    initializer: Initializer | None


class EngineOptions(_TransformOptions, total=False):
    """What `Engine` takes beside the stage; the last is the older spelling of `micro_batches`."""

    initializer: Initializer | None
    leaf_modules: LeafSpec | None
    own: Own
    micro_batches: int
    average_micro_batches: bool
    max_norm: float | None
    loss_scale: Scale
    check_finite: bool
    master_weights: bool
    state_dtype: StateDtype
    stochastic_rounding: bool
    gradient_accumulation_steps: int


BUCKET_BYTES = {0: 8 * 2**20, 1: 4 * 2**20, 2: 4 * 2**20}
"""Default bucket of a stage: large enough that latency does not count on gloo. At stages 1 and 2
memory beyond this rank's part of the gradients is a few buckets, and a large layer is one of its
own, which is never copied; at stage 0 a bucket is summed where its gradients stay, so that a larger
one takes no more of it (see benchmarks/)."""
_USUAL = ", ".join(f"{size} at stage {stage}" for stage, size in BUCKET_BYTES.items())


def _are_points(x: Any) -> bool:
    several: list[Any] = [*x] if isinstance(x, list | tuple) else [x]
    return isinstance(x, list | tuple) and all(isinstance(one, Points) for one in several)


def _step(fix: str) -> dict[str, str]:
    return dict.fromkeys(("init", "shard"), fix)


def _of_step(fix: str) -> dict[str, str]:
    return _step(fix) | {"plan": f"{fix}, and plan.of_step plans that step"}


def _of_rule(name: str) -> dict[str, str]:
    fix = f"the rule has it: fzero.optim.adamw(..., {name}=), fzero.optim.from_torch(..., {name}=)"
    return dict.fromkeys(("init", "shard", "plan"), fix)


def _of_module(fix: str) -> dict[str, str]:
    return dict.fromkeys(("init", "shard", "plan"), fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """Which stage, and on which ranks."""

    stage: Stages = option(
        REQUIRED,
        "0, 1, 2 or 3; of `init` and `shard` also a pytree of such.",
        check=ValueCheck(
            lambda x: is_count(x, 0) and x <= 3,
            "0 (replicas), 1 (+ optimizer sharded), 2 (+ gradients) or 3 (+ parameters)",
            "a ZeRO stage that does not exist.",
        ),
        deepspeed=ZERO + "stage",
        axis="stages",
    )
    mesh: MeshLike = option(
        None,
        "default the world (what torchrun started; else one rank); named axes of it, "
        '{"data": 2, "seq": 4}, or an fzero.Mesh; a DeviceMesh of one dim, or of two, (replicate, '
        "shard); or their sizes (R, S), R S being the world's. Of `init` and `shard` also a pytree "
        "of such.",
        axis="meshes",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """What a state is planned from, of every driver."""

    optimizer_over: OptimizerOver = option(
        "shard",
        "which ranks of a mesh of two dims share gradients, masters and optimizer states: "
        '"shard", those of each replica, or "all".',
        check=one_of(
            *("shard", "all"),
            wanted='"shard" (the ranks of one replica share masters and optimizer states) or '
            '"all" (all ranks of the mesh do)',
        ),
        stages=(1, 2, 3),
        axis="meshes",
    )
    logical_ranks: int | None = option(
        None,
        "L, the number of ranks that the run is written for. Any number of ranks, 1 to L, carries "
        "them, and every bit of the run is the same: each sum is made in one order, and random "
        "numbers are those of a logical rank. Losses, batches and `axis_index()` in a loss are of "
        "logical ranks. None: the ranks that there are.",
        check=ValueCheck(lambda x: x is None or is_count(x), "an int of 1 or more, or None"),
    )
    seed: int = option(
        0,
        "of torch's generators, which are set before each logical rank runs: by the seed, the "
        "update, the call and the logical rank. For `logical_ranks` only.",
        check=ValueCheck(
            lambda x: is_count(x, 0) and x < 2**63, "an int of 0 to 2**63 - 1", "a tensor, or -1."
        ),
    )
    gathering: Gathering
    units: Units = option(
        None,
        "path -> name of the unit it is gathered with; default `fzero.machine.partition.unit_of`.",
        check=of_path("units"),
        stages=(3,),
    )
    trainable: Trainable = option(
        None,
        "path -> whether it learns; on top of the rule in `fzero.machine.partition.plan_layout`.",
        check=of_path("trainable"),
        instead={
            "Engine": "a module says it itself, and autograd must know it: call "
            "p.requires_grad_(False) on each frozen parameter before Engine(...)"
        },
    )
    frozen: Frozen = option(
        None,
        "the codec that leaves which are not trained are stored and gathered by: "
        "`fzero.codecs.nf4()`, or one of your own. Each is decoded for the kernel that reads it, "
        "in the forward and again in the backward, and training has the bits of one on the decoded "
        "values. A codec is used for floating leaves of two or more dims; (path, leaf) -> a codec, "
        "or None to leave it as it is, says it of each frozen floating leaf.",
        check=ValueCheck(
            lambda x: (
                x is None or isinstance(x, Codec) or (callable(x) and not isinstance(x, type))
            ),
            "a codec of fzero.codecs, or a function (path, leaf) -> codec or None",
            "the class of a codec in the place of a codec, or its name.",
        ),
    )
    bucket_bytes: int | None = option(
        None,
        "the size in bytes up to which leaves share a collective; default 8 MiB at stage 0, 4 MiB "
        "at stages 1 and 2.",
        check=ValueCheck(
            lambda x: x is None or is_count(x), f"bytes, or None for the default ({_USUAL})"
        ),
        stages=(0, 1, 2),
        deepspeed=ZERO + "reduce_bucket_size",
        axis="buckets",
    )
    reduction: Reduction
    autocast: Autocast | torch.dtype | None = option(
        None,
        "losses are computed under torch.autocast with this dtype, and the parameters of safe "
        "modules cross ranks in it, in groups of their own (see `fzero.autocast`, and `Autocast` "
        "for their names). `step.init` passes that of its own transform.",
        instead={"shard": "fzero.autocast(step, dtype=) is a transform of the step"},
        deepspeed="torch_autocast.enabled",
        axis="precisions",
    )
    offload: Offload | None = option(
        None,
        "what lives in host memory or on disk, and where; see `fzero.offload`. `step.init` passes "
        "that of its own transform.",
        instead={"shard": "fzero.offload(step, ...) is a transform of the step"},
        deepspeed=ZERO + "offload_optimizer.device",
        axis="offload",
    )
    local: Local | None = option(
        None,
        "replicas make `every` updates apart, then an outer update together: see `fzero.local`. "
        "`step.init` passes that of its own transform.",
        check=ValueCheck(
            lambda x: x is None or isinstance(x, Local), "a fzero.Local(every=...), or None"
        ),
        instead=dict.fromkeys(
            ("shard", "plan"), "fzero.local(step, every=) is a transform of the step"
        ),
    )
    compress: Compress | None = option(
        None,
        "what crosses ranks encoded, and by which codec: see `fzero.compress`. `step.init` passes "
        "that of its own transform.",
        check=ValueCheck(
            lambda x: x is None or isinstance(x, Compress),
            "fzero.Compress(gradients=codec, parameters=codec), with codecs of fzero.codecs",
        ),
        instead={"shard": "fzero.compress(step, gradients=codec) is a transform of the step"},
        deepspeed="communication_data_type",
        axis="wires",
    )
    transforms: Sequence[Points] = option(
        (),
        "what acts at the points of a step and keeps slots in the state, from the inside out: see "
        "`fzero.transform`. `step.init` passes those around its step.",
        check=ValueCheck(
            _are_points,
            "a list of what fzero.transform returns",
        ),
        instead=dict.fromkeys(
            ("shard", "plan"),
            "what fzero.transform returns is a transform of the step, ema(step), and plan.of_step "
            "plans that step",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOptions:
    """What an engine must know of its module."""

    leaf_modules: LeafSpec | None = option(
        None,
        "modules whose parameters are one unit, whatever `units` says of them.",
        check=ValueCheck(
            lambda x: x is None or isinstance(x, LeafSpec),
            "a fzero.adapter.LeafSpec(classes=..., names=..., name_suffixes=...)",
        ),
        stages=(3,),
        instead=_of_module(
            "parameters have paths and no modules: units=apply.units, of apply, params = "
            "fzero.functionalize(model, units=lambda path, module: ...)"
        ),
        deepspeed=ZERO + "leaf_module.classes",
    )
    own: Own = option(
        (),
        "paths of buffers, and of tensors in attributes of the module, that each rank has for "
        "itself. Of all others an engine takes rank 0's buffers, and refuses attributes that "
        "differ by rank.",
        instead=_of_module(
            "parameters have no buffers: apply, params = fzero.functionalize(model, own=paths)"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions:
    """Where the first values of a state come from, and whether a step overwrites its own."""

    initializer: Initializer | None = option(
        None,
        "(path, leaf) -> values of that leaf, for parameters that have shapes and dtypes only "
        "(tensors on the meta device): so that no rank ever holds the model. The values of rank 0 "
        "are used on every rank.",
        instead={
            "shard": "a step has no parameters: step.init(params, optimizer, initializer=)",
            "plan": "a plan needs no values: a model on the meta device will do",
        },
    )
    donate: bool = option(
        False,
        "`apply_gradients` then writes into the buffers of the state it is given, at fused speed "
        "and without a second copy. That state, and every state that shares its buffers, is used "
        "up: using it again raises `DonatedError`. If the step raises before the update, also in a "
        "backward, the state is still good.",
        check=FLAG,
        instead={
            "init": "a step donates its states: fzero.shard(step, stage=, donate=True)",
            "Engine": "an engine always writes into its own buffers: leave it out",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Updating:
    """What `step` of an engine does with gradients."""

    micro_batches: int = option(
        1,
        "how many micro-batches one update has: an engine updates at every n-th `step()`; a plan "
        "cuts its batch into so many parts, as `fzero.accumulate` does.",
        check=ValueCheck(
            is_count,
            "an int of 1 or more (gradient_accumulation_steps and accumulate's steps are older "
            "spellings of it)",
        ),
        instead=_step("fzero.accumulate(step, micro_batches=) is a transform of the step"),
        deepspeed="gradient_accumulation_steps",
        axis="micro_batches",
    )
    average_micro_batches: bool = option(
        False,
        "divide by the number of step() calls, or backwards if each updates.",
        check=FLAG,
        instead=dict.fromkeys(("init", "shard", "plan"), "fzero.accumulate always averages"),
    )
    max_norm: float | None = option(
        None,
        "clip the global gradient norm; None: not clipped.",
        check=ValueCheck(
            lambda x: x is None or is_positive(x), "a positive number, or None for off"
        ),
        instead=_step("fzero.clip(step, max_norm=) is a transform of the step"),
        deepspeed="gradient_clipping",
        axis="clipping",
    )
    loss_scale: Scale = option(
        None,
        'of `fzero.scale_loss`: a number, "dynamic", a `DynamicScale`, or the user\'s own. Losses '
        "go through `backward` or `scale`. An overflow on any rank skips the update on all; see "
        '`step_was_skipped`. 1: no scale. None: "dynamic" for autocast in fp16, else 1.',
        instead=_of_step("fzero.scale_loss(step, scale=) is a transform of the step"),
        deepspeed="fp16.loss_scale",
        axis="loss_scales",
    )
    check_finite: bool = option(
        False,
        "`step()` raises `NonFiniteError`, on every rank, if a loss that `backward` was given, or "
        "a gradient, is NaN or infinite: see `fzero.check_finite`.",
        check=FLAG,
        instead=_of_step("fzero.check_finite(step) is a transform of the step"),
    )
    master_weights: bool = option(
        True,
        "fp32 copies of 16-bit parameters.",
        check=FLAG,
        instead=_of_rule("master_weights"),
        deepspeed="bf16.bf16_master_weights_and_grads",
        axis="precisions",
    )
    state_dtype: StateDtype = option(
        None,
        "of the optimizer's states, or the codec that keeps them, as in `fzero.optim.adamw`.",
        instead=_of_rule("state_dtype"),
        deepspeed="bf16.bf16_optimizer_states",
    )
    stochastic_rounding: bool = option(
        False,
        "of bf16 parameters without masters, as in `fzero.optim.adamw`.",
        check=FLAG,
        instead=_of_rule("stochastic_rounding"),
    )


RECORDS = (PlaceOptions, SharedOptions, ModuleOptions, ValueOptions, Updating)
"""All records that have options, in the order in which signatures and tables show them."""


def grouped(kind: type, keywords: Mapping[str, Any], **more: Any) -> Any:
    """Build a record, and the `Gathering` and `Reduction` in it, of the options that are its own.

    Example:
        >>> grouped(SharedOptions, {"ordered": True, "stage": 2}).reduction.ordered
        True
    """
    return kind(
        reduction=one_record(Reduction, keywords),
        gathering=one_record(Gathering, keywords),
        **_own(kind, keywords),
        **more,
    )


def one_record(kind: type, keywords: Mapping[str, Any]) -> Any:
    """Build a record of those keywords that are options among its fields."""
    return kind(**_own(kind, keywords))


def _own(kind: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    names = (one.name for one in fields(kind) if "option" in one.metadata)
    return {name: keywords[name] for name in names if name in keywords}
