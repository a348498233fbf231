"""Read where the buffers of a state are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from fzero.state import NAMESPACE, Buffers, Placement, TrainState
from fzero.state.alive import require_not_donated
from fzero.state.view import require_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferKind:
    """Where the buffers of one kind are, of some groups. placement None: the state has none."""

    kind: str  # parameters, gathered, window, residual, gradients, optimizer, or a slot's name
    placement: Placement | None
    groups: tuple[int, ...]


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
    found.append(BufferKind(kind="optimizer", placement=place, groups=layout.trainable))
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
