"""The options as typed keywords, for `Unpack`. A test compares them with the table."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from fzero.ranks.mesh import MeshLike
from fzero.state import OptimizerOver, ReduceOp, Reshard
from fzero.state.scale import DynamicScale

Stages = int | dict[str, Any] | list[Any] | tuple[Any, ...]
"""A ZeRO stage, or a pytree of stages: one for each model."""

Units = Callable[[str], str] | None
"""path -> name of its unit; None: what `fzero.machine.partition.unit_of` says."""

Trainable = Callable[[str], bool] | None
"""path -> whether it learns."""

Initializer = Callable[[str, Tensor], Tensor]
"""(path, leaf) -> its values."""

Own = Collection[str]
"""Paths of tensors of a module that each rank has for itself."""

Scale = float | Literal["dynamic"] | DynamicScale | Tensor | Callable[[], Any] | None
"""What `fzero.scale_loss` takes."""


class StateOptions(TypedDict, total=False):
    """What every driver takes: how a state is laid out, gathered and reduced."""

    mesh: MeshLike
    optimizer_over: OptimizerOver
    reshard_after_forward: Reshard
    prefetch_numel: int
    persistence_threshold_numel: int
    units: Units
    bucket_bytes: int | None
    ordered: bool
    overlap: bool
    contiguous_gradients: bool
    accumulate_dtype: torch.dtype | None
    reduce_op: ReduceOp
    gradient_predivide_factor: float


class InitOptions(StateOptions, total=False):
    """What `init`, `shard` and `plan` share."""

    trainable: Trainable
