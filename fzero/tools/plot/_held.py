"""Read where the buffers of a state are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
from torch import Tensor

from fzero.checkpoint.elements import state_of_rank
from fzero.machine.owners import owners_of
from fzero.optim.entries import slots_of
from fzero.state import NAMESPACE, Buffers, Placement, TrainState
from fzero.state.alive import require_not_donated
from fzero.state.view import require_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferKind:
    """Where the buffers of one kind are, of some groups. placement None: the state has none.

    owned: {number of a leaf: its owner, see `Owners`}, where the owner alone keeps anything.
    """

    kind: str  # parameters, gathered, window, residual, gradients, optimizer, or a slot's name
    placement: Placement | None
    groups: tuple[int, ...]
    owned: Mapping[int | None, int] = field(default_factory=dict[int | None, int])


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
    owned = _owned(state)
    found.append(
        BufferKind(kind="optimizer", placement=place, groups=layout.trainable, owned=owned)
    )
    return found


def _owned(state: TrainState) -> dict[int | None, int]:
    """Return {number of a leaf: its owner}, where a rule keeps nothing of it but there."""
    owners, rule = owners_of(state.setup), state.setup.optimizer
    if owners is None:
        return {}
    one_rank = state_of_rank(state, 0) if is_stacked(state) else state
    even = {slot.group for slot in slots_of(one_rank)}
    trainable = state.setup.layout.trainable
    return {
        one.index: one.owner
        for one in owners.leaves
        if trainable[one.position] not in even
        and (rule.kept_of(one.leaf) or rule.made_by_steps(one.leaf))
    }


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
