"""Read where the buffers of a state are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
from torch import Tensor

from fzero.checkpoint.elements import state_of_rank
from fzero.errors import LayoutError
from fzero.machine.by_path import leaf_paths
from fzero.optim.entries import rule_entries
from fzero.state import NAMESPACE, Buffers, Placement, TrainState
from fzero.state.alive import require_not_donated
from fzero.state.view import require_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferKind:
    """Where the buffers of one kind are, of some groups. placement None: the state has none.

    alone: {number of a leaf: its ranks}, where those keep all of it, and others nothing.
    """

    kind: str  # parameters, gathered, window, residual, gradients, optimizer, or a slot's name
    placement: Placement | None
    groups: tuple[int, ...]
    alone: Mapping[int | None, set[int]] = field(default_factory=dict[int | None, set[int]])


def buffers_held(state: Any) -> list[BufferKind]:
    """Return the buffers of `state`: parameters, gradients and optimizer; others if it has them.

    Raises `LayoutError` for anything but one `TrainState`, `DonatedError` for a used-up one.
    """
    require_state("fzero.plot", state)
    require_not_donated(state)
    layout = state.setup.layout
    every = tuple(range(len(layout.groups)))
    gathered = Buffers(flats=state.window.gathered, placement=Placement.REPLICATED)
    found = [_buffers("parameters", state.params, every)]
    if gathered.held:
        found.append(_buffers("gathered", gathered, every))
    if state.window.pending.held:
        found.append(_buffers("window", state.window.pending, layout.trainable))
    for name, slot in state.slots.items():
        if isinstance(slot.value, Buffers) and slot.value.held:
            groups = every if slot.form.leaves == "all" else layout.trainable
            found.append(_buffers(name, slot.value, groups))
    found.append(_buffers("gradients", state.gradients, layout.trainable))
    place = state.setup.optimizer_state if _has_slots(state) else None
    alone = _alone(state)
    found.append(
        BufferKind(kind="optimizer", placement=place, groups=layout.trainable, alone=alone)
    )
    return found


def _alone(state: TrainState) -> dict[int | None, set[int]]:
    """Return {number of a leaf: its ranks} of the leaves that are kept whole, or nowhere."""
    layout, found = state.setup.layout, dict[int | None, set[int]]()
    numbers = {name: i for i, name in enumerate(leaf_paths(layout))}
    for rank in ranks_of(state):
        try:
            own = state_of_rank(state, rank) if is_stacked(state) else state
            entries = rule_entries(own, rank)
        except LayoutError:  # an optimizer whose state goes with no leaf
            return {}
        flats = {group for one in entries if one.per_leaf for group in one.values}
        cut = {leaf for group in flats for leaf in layout.groups[group].leaves}
        for one in (one for one in entries if not one.per_leaf):
            for name in one.values:
                if (leaf := numbers[name]) not in cut:
                    found.setdefault(leaf, set()).update({rank} if name in one.owned else ())
    return found


def ranks_of(state: TrainState) -> tuple[int, ...]:
    """Return the ranks of `state`: all for a stacked one (`fzero.simulate`), else the calling rank.

    Raises `AxisError` for one virtual rank's state outside of `fzero.simulate`.
    """
    if is_stacked(state):
        return tuple(range(state.setup.axis.size))
    return (state.setup.axis.rank,)


def is_stacked(state: TrainState) -> bool:
    """Whether every tensor of `state` has a leading dim, the ranks."""
    return state.step.ndim == 1


def _has_slots(state: TrainState) -> bool:
    """Whether the optimizer keeps something by element: no counters, nothing empty."""
    leaves = optree.tree_leaves(state.optimizer, namespace=NAMESPACE)
    scalar = 1 if is_stacked(state) else 0
    return any(isinstance(x, Tensor) and x.ndim > scalar and x.numel() for x in leaves)


def _buffers(kind: str, buffers: Buffers, groups: Sequence[int]) -> BufferKind:
    placement = buffers.placement if buffers.held else None
    return BufferKind(kind=kind, placement=placement, groups=tuple(groups))
