"""Read the buffers of a state, for all plots."""

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
    """The buffers of one kind. `flats[i]` is of group `groups[i]`; None: the state has none.

    The optimizer's own record has no flats here: only where its tensors live is known.
    """

    kind: str  # parameters, gathered, window, residual, gradients, optimizer, or a slot's name
    placement: Placement | None
    groups: tuple[int, ...]
    flats: tuple[Tensor, ...] = ()


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
    if state.window.residual.held:
        there = state.window.residual.flats[: len(layout.trainable)]  # the others: of sums
        place = Placement.PARTIAL if state.setup.reduction.over == "all" else state.setup.params
        lost = Buffers(flats=there, placement=place)
        found.append(_buffers("residual", lost, layout.trainable))
    for name, slot in state.slots.items():
        if isinstance(slot.value, Buffers) and slot.value.held:
            groups = every if slot.form.leaves == "all" else layout.trainable
            found.append(_buffers(name, slot.value, groups))
    found.append(_buffers("gradients", state.gradients, layout.trainable))
    place = state.setup.optimizer_state if optimizer_tensors(state) else None
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


def rank_view(state: TrainState, tensor: Tensor, rank: int) -> Tensor:
    """Return the part of `rank` of a tensor of the state."""
    return tensor[rank] if is_stacked(state) else tensor


def optimizer_tensors(state: TrainState) -> list[tuple[str, Tensor]]:
    """Return (path, tensor) for what the optimizer keeps by element: no counters, nothing empty."""
    tree: Any = state.optimizer
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    scalar = 1 if is_stacked(state) else 0
    return [
        (accessor.codify("").lstrip("."), leaf)
        for accessor, leaf in zip(accessors, leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.ndim > scalar and leaf.numel()
    ]


def _buffers(kind: str, buffers: Buffers, groups: Sequence[int]) -> BufferKind:
    placement = buffers.placement if buffers.held else None
    return BufferKind(kind=kind, placement=placement, groups=tuple(groups), flats=buffers.flats)
