"""Local updates: replicas that train apart, and the outer update that brings them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from fzero.errors.check import is_count, require
from fzero.ranks.mesh import Axis
from fzero.state.buffers import Buffers, Placement
from fzero.state.slots import Form, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """How replicas train apart: see `fzero.local`.

    Attributes:
        every: updates of a replica between two outer updates, at least 1.
        outer: the rule of the outer update, from `fzero.optim`, which may need a matrix; None: SGD
            with rate 0.7 and Nesterov momentum 0.9.
        fragments: in how many parts the parameters meet, each at another update; at most `every`.
        delay: updates of a replica from the exchange of a fragment to its outer update, fewer than
            `every`.
        mixing: the share of its own parameters that a replica keeps then, 0 to below 1.

    Raises `LayoutError` for another number.
    """

    every: int
    outer: Any = None
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        """Check it."""
        require("local: every", self.every, is_count, "at least 1")
        wanted = f"1 to {self.every}, the number of updates of a replica between two meetings"
        require(
            "local: fragments", self.fragments, lambda x: is_count(x) and x <= self.every, wanted
        )
        wanted = f"0 to {self.every - 1}: a fragment arrives before it is exchanged again"
        late = type(self.delay) is int and 0 <= self.delay < self.every
        require("local: delay", self.delay, lambda _: late, wanted)
        wanted = "at least 0 and below 1: with 1 replicas would never meet"
        require("local: mixing", self.mixing, _is_share, wanted)

    def numbers_in(self, fragment: int, count: int) -> range:
        """Return which of the groups that learn, of which there are `count`, are in a fragment."""
        return range(fragment, count, self.fragments)


def _is_share(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1


class Departure(NamedTuple):
    """The exchange of a fragment is due: how far the replicas have moved, summed."""

    fragment: int


class Arrival(NamedTuple):
    """The outer update of a fragment is due: by the move that was exchanged."""

    fragment: int


NAME = "local"
ANCHORS, RULE, COMING, WEIGHT = (f"{NAME}/{x}" for x in ("anchors", "rule", "coming", "weight"))
"""The slots of a state with local updates. The note of the anchors has what is no tensor."""

_OWN = Form(leaves="record", elsewhere="own", kind="optimizer")
FORMS = {
    ANCHORS: Form(kind="optimizer"),
    RULE: _OWN,
    COMING: _OWN,
    WEIGHT: Form(leaves="number", placement=Placement.PARTIAL, elsewhere="own", kind="numbers"),
}
"""Their forms. A checkpoint has them under names of its own, once for all replicas."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outer:
    """What a replica needs for the next outer update: its slots, read.

    anchors: the parameters after the last one, parallel to the groups that learn, in fp32 or wider,
    placed as the optimizer's state; equal on all replicas. `weight`: of each fragment 0 if this
    replica is left out of its next mean, else 1. `coming`: of each fragment the mean move of the
    replicas from its exchange to its outer update, as the anchors are; else nothing.
    `mesh` has the ranks of all replicas.
    """

    anchors: Buffers
    # Of each fragment: the record of the rule of the outer update, empty for other flats.
    optimizers: tuple[Any, ...]
    weight: Tensor  # [fragments] fp32
    coming: tuple[Buffers, ...] = ()
    updates: int = 0  # of the replica, of the `every` of a round
    local: Local
    mesh: Axis = field(default_factory=lambda: Axis(size=1))


def outer_in(slots: Mapping[str, Slot]) -> Outer | None:
    """Return what the slots of a state have of local updates; None if it has none."""
    anchors = slots.get(ANCHORS)
    if anchors is None:
        return None
    rules, coming, weight = (slots[name].value for name in (RULE, COMING, WEIGHT))
    updates, local, mesh = anchors.note
    return Outer(
        anchors=anchors.value,
        optimizers=rules,
        weight=weight,
        coming=coming,
        updates=updates,
        local=local,
        mesh=mesh,
    )


def with_outer(slots: Mapping[str, Slot], outer: Outer | None) -> dict[str, Slot]:
    """Return slots with these of local updates; without any for None.

    Example:
        >>> import torch
        >>> local = Local(every=4)
        >>> held = Outer(anchors=Buffers(), optimizers=(), weight=torch.ones(1), local=local)
        >>> sorted(with_outer({}, held)), with_outer(with_outer({}, held), None)
        (['local/anchors', 'local/coming', 'local/rule', 'local/weight'], {})
    """
    if outer is None:
        return {name: slot for name, slot in slots.items() if name not in FORMS}
    values = {
        ANCHORS: outer.anchors,
        RULE: outer.optimizers,
        COMING: outer.coming,
        WEIGHT: outer.weight,
    }
    made = {name: Slot(value=value, form=FORMS[name]) for name, value in values.items()}
    noted = replace(made[ANCHORS], note=(outer.updates, outer.local, outer.mesh))
    return {**slots, **made, ANCHORS: noted}  # each in its place: digests have this order


def saw_update(outer: Outer) -> tuple[Outer, list[Departure | Arrival]]:
    """Count an update of the replica, also one that was skipped: what is due, in this order?

    All replicas make as many calls, though each skips by its own gradients: so calls are counted.
    The fragments are spread over the round evenly, and the exchange of the last one ends it. Each
    arrives `delay` updates after its exchange, those of earlier exchanges first. In the first round
    nothing of it may be on its way yet.

    Example:
        >>> import torch
        >>> local = Local(every=4, fragments=2, delay=1)
        >>> held = Outer(anchors=Buffers(), optimizers=(), weight=torch.ones(2), local=local)
        >>> for _ in range(5):
        ...     held, due = saw_update(held)
        ...     print(due)
        [Arrival(fragment=1)]
        [Departure(fragment=0)]
        [Arrival(fragment=0)]
        [Departure(fragment=1)]
        [Arrival(fragment=1)]
    """
    local, updates = outer.local, outer.updates + 1
    ends = [(fragment + 1) * local.every // local.fragments for fragment in range(local.fragments)]
    departs = [Departure(f) for f, end in enumerate(ends) if end == updates]
    arrives = [
        Arrival(f) for f, end in enumerate(ends) if (end + local.delay - updates) % local.every == 0
    ]
    due = [*arrives, *departs] if local.delay else [*departs, *arrives]
    return replace(outer, updates=updates % local.every), due
