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
        fragments: in how many parts the parameters meet, each at another update; at most `every`.

    Raises `LayoutError` for another number.
    """

    every: int
    outer: Any = None
    fragments: int = 1

    def __post_init__(self) -> None:
        """Check it."""
        require("local: every", self.every, is_count, "at least 1")
        wanted = f"1 to {self.every}, the number of updates of a replica between two meetings"
        require(
            "local: fragments", self.fragments, lambda x: is_count(x) and x <= self.every, wanted
        )

    def numbers_in(self, fragment: int, count: int) -> range:
        """Return which of the groups that learn, of which there are `count`, are in a fragment."""
        return range(fragment, count, self.fragments)


@record
class Outer:
    """What a replica needs for the next outer update.

    anchors: the parameters after the last one, parallel to the groups that learn, in fp32 or wider,
    placed as the optimizer's state; equal on all replicas. `weight`: of each fragment 0 if this
    replica is left out of its next mean, else 1. `mesh` has the ranks of all replicas.
    """

    anchors: Buffers
    optimizers: tuple[Any, ...]  # of each fragment: the record of the rule of the outer update
    weight: Tensor  # [fragments] fp32
    updates: int = static(default=0)  # of the replica, of the `every` of a round
    local: Local = static()
    mesh: Axis = static(default=Axis(size=1))


def saw_update(outer: Outer) -> tuple[Outer, int | None]:
    """Count an update of the replica, also one that was skipped: which fragment is due, if any?

    All replicas make as many calls, though each skips by its own gradients: so calls are counted.
    The fragments are spread over the round evenly, and the last one ends it.

    Example:
        >>> import torch
        >>> local = Local(every=5, fragments=2)
        >>> held = Outer(anchors=Buffers(), optimizers=(), weight=torch.ones(2), local=local)
        >>> due = []
        >>> for _ in range(10):
        ...     held, fragment = saw_update(held)
        ...     due.append(fragment)
        >>> due
        [None, 0, None, None, 1, None, 0, None, None, 1]
    """
    every, fragments = outer.local.every, outer.local.fragments
    updates = outer.updates + 1
    ends = [(fragment + 1) * every // fragments for fragment in range(fragments)]
    due = ends.index(updates) if updates in ends else None
    return replace(outer, updates=updates % every), due
