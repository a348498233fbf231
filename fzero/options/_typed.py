"""The options as typed keywords, for `Unpack`. A test compares them with the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from fzero.ranks.mesh import MeshLike
from fzero.state import Local, OptimizerOver, ReduceOp, Reshard
from fzero.state.codec import Codec, Compress
from fzero.state.layout import LeafSpec
from fzero.state.points import Points
from fzero.state.scale import DynamicScale
from fzero.state.setup import Autocast, Offload

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
