"""How far ranks are on their way to the next update: what a checkpoint, which is idle, has not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fzero.errors import PhaseError
from fzero.machine.offload import offloaded
from fzero.state import Buffers, Progress, TrainState
from fzero.state.scale import LossScale, with_slot
from fzero.transforms.weights import own_weight, with_own_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """How far one rank is on its way to the next update; its gradients are all reduced."""

    progress: Progress
    weight: tuple[float, ...] | None  # of this rank's own gradients
    scale: LossScale | None  # what gradients were multiplied by; None: none are held
    has_gradients: bool
    is_open: bool  # a coalescing window
    length: int
    is_settled: bool


def under_way(state: TrainState) -> UnderWay:
    """Return how far a rank is.

    Raises `PhaseError` for gradients of which a codec keeps what it has lost.
    """
    window, held, weight = state.window, state.gradients.held, own_weight(state)
    if window.residual_before.held:
        raise PhaseError(
            "reshard: a state with gradients, and with a codec that has a memory.",
            cause="a call between the gradient and the update of a compressed step.",
            fix="call it after the update.",
        )
    return UnderWay(
        progress=state.progress,
        weight=None if weight is None else tuple(weight.tolist()),
        scale=state.scale if held else None,
        has_gradients=held,
        is_open=window.is_open,
        length=window.length,
        is_settled=window.is_settled,
    )


def next_way(said: Sequence[tuple[UnderWay | None, bool]], rank: int) -> UnderWay:
    """Return how far a rank is after a move: as before, and as ranks that leave.

    said: of every rank how far it was, None without a state; and whether it is in the new mesh.
    """
    known = [way for way, _ in said if way is not None]
    own = said[rank][0]
    if own is None:
        fresh = replace(known[0].progress, nonfinite=None)
        own = replace(known[0], progress=fresh)
        own = replace(own, weight=None if own.weight is None else (0.0,) * len(own.weight))
    gone: list[UnderWay] = []
    if rank == next(r for r, (_, is_in) in enumerate(said) if is_in):  # one rank has theirs
        gone = [way for way, is_in in said if way is not None and not is_in]
    used = 0
    for way in known:  # what any rank has used is stepped
        used |= way.progress.used
    bad = [way.progress.nonfinite for way in (own, *gone) if way.progress.nonfinite is not None]
    progress = replace(own.progress, used=used, nonfinite=bad[0] if bad else None)
    weight = own.weight
    for way in gone:
        if weight is None or way.weight is None:
            weight = weight or way.weight
        else:
            weight = tuple(a + b for a, b in zip(weight, way.weight, strict=True))
    return replace(own, progress=progress, weight=weight)


def gradients_like(state: TrainState, way: UnderWay) -> Buffers:
    """Return zeros for the gradients that are held."""
    setup = state.setup
    if not way.has_gradients:
        return Buffers()
    made = (
        torch.zeros(
            setup.numel(i, setup.gradients), dtype=setup.accumulate_dtype(i), device=state.device
        )
        for i in setup.layout.trainable
    )
    flats = tuple(offloaded(setup.offload.gradients, x, setup.offload) for x in made)
    return Buffers(flats=flats, placement=setup.gradients)


def with_way(state: TrainState, way: UnderWay) -> TrainState:
    """Return a state that is so far on its way."""
    weight = way.weight
    window = replace(
        state.window, is_open=way.is_open, length=way.length, is_settled=way.is_settled
    )
    if weight is not None:
        state = with_own_weight(state, torch.tensor(weight, dtype=torch.float64))
    scale = state.scale
    if way.scale is not None and scale is not None:
        device, told = scale.scale.device, way.scale
        numbers = ("scale", "good_updates", "hysteresis_left", "overflowed")
        scale = replace(told, **{name: getattr(told, name).to(device) for name in numbers})
    slots = with_slot(state.slots, scale)
    return state.replace(window=window, progress=way.progress, slots=slots)
