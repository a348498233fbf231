"""The static facts of a training run: they ride in the treespec of every state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from fzero.mesh import Axis
from fzero.state.buffers import Placement
from fzero.state.layout import Layout


class Keep(Enum):
    """How long stage 3 keeps a unit's gathered parameters."""

    UNIT = "unit"  # while the unit runs: gathered in forward, and again in backward
    BACKWARD = "backward"  # from before forward until after backward: gathered once a call
    WINDOW = "window"  # over a coalescing window: gathered once, whatever the calls


class StatefulUpdate(Protocol):
    """What a state needs of an optimizer, on the list of this rank's flat shards."""

    @property
    def init(self) -> Callable[..., Any]:
        """(params) -> optimizer state."""
        ...

    @property
    def advance(self) -> Callable[..., tuple[list[Tensor], Any]]:
        """(params, grads, optimizer state, pieces, ...) -> (params, optimizer state)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the transforms around the running step asked for; neutral between steps."""

    max_norm: float | None = None  # clip: bound of the global gradient norm
    grad_scale: float = 1.0  # accumulate: 1 / micro-batches
    defer_update: bool = False  # accumulate: not the last micro-batch
    donate: bool = False  # shard: buffers may be overwritten


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Stage, axis, layout, optimizer: what does not change from step to step."""

    stage: int
    axis: Axis
    layout: Layout
    optimizer: StatefulUpdate
    keep: Keep = Keep.UNIT
    lockstep: bool = False  # stage 3: ranks promise to read the same units in the same order
    ordered: bool = False
    policy: Policy = field(default_factory=Policy)

    @property
    def gathers_by_unit(self) -> bool:
        """Whether parameters are gathered as the loss reads them, unit by unit."""
        return self.stage == 3 and self.axis.size > 1 and self.keep is Keep.UNIT

    @property
    def params(self) -> Placement:
        """Where parameters live between calls."""
        return Placement.SHARDED if self.stage == 3 else Placement.REPLICATED

    @property
    def gradients(self) -> Placement:
        """Where reduced gradients live."""
        return Placement.SHARDED if self.stage >= 2 else Placement.REPLICATED

    @property
    def optimizer_state(self) -> Placement:
        """Where the optimizer's state lives."""
        return Placement.SHARDED if self.stage >= 1 else Placement.REPLICATED
