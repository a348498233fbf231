"""Local updates: replicas that train apart, and the outer update that brings them together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fzero.errors.check import is_count, require
from fzero.ranks.axis import Axis
from fzero.state._record import record, static
from fzero.state.buffers import Buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """How replicas train apart: see `fzero.local`.

    Attributes:
        every: updates of a replica between two outer updates, at least 1.
        outer: the rule of the outer update, from `fzero.optim`; None: SGD with rate 0.7 and
            Nesterov momentum 0.9.

    Raises `LayoutError` for another `every`.
    """

    every: int
    outer: Any = None

    def __post_init__(self) -> None:
        """Check it."""
        require("local: every", self.every, is_count, "at least 1")


@record
class Outer:
    """What a replica needs for the next outer update.

    anchors: the parameters after the last one, parallel to the groups that learn, in fp32 or wider,
    placed as the optimizer's state; equal on all replicas. `weight`: 0 if this replica is left out
    of the next mean, else 1. `mesh` has the ranks of all replicas.
    """

    anchors: Buffers
    optimizer: Any  # of the rule of the outer update: its own record
    weight: Tensor  # [] fp32
    updates: int = static(default=0)  # of the replica, since the last outer update
    local: Local = static()
    mesh: Axis = static()


def saw_update(outer: Outer) -> tuple[Outer, bool]:
    """Count an update of the replica, also one that was skipped: is the outer update due?

    All replicas make as many calls, though each skips by its own gradients: so calls are counted.
    """
    updates = outer.updates + 1
    due = updates >= outer.local.every
    return replace(outer, updates=0 if due else updates), due
