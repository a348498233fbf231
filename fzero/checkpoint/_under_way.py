"""How far ranks are on their way to the next update: the numbers that ride beside tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fzero.state import Progress, TrainState
from fzero.transforms.kept import require_movable


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """How far one rank is on its way to the next update; its gradients are all reduced."""

    progress: Progress
    is_open: bool  # a coalescing window
    length: int
    is_settled: bool


def under_way(state: TrainState) -> UnderWay:
    """Return how far a rank is. Raises `PhaseError` where it cannot move."""
    require_movable(state)
    window = state.window
    return UnderWay(
        progress=state.progress,
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
        own = replace(known[0], progress=replace(known[0].progress, nonfinite=None))
    gone: list[UnderWay] = []
    if rank == next(r for r, (_, is_in) in enumerate(said) if is_in):  # one rank has theirs
        gone = [way for way, is_in in said if way is not None and not is_in]
    used = 0
    for way in known:  # what any rank has used is stepped
        used |= way.progress.used
    bad = [way.progress.nonfinite for way in (own, *gone) if way.progress.nonfinite is not None]
    return replace(own, progress=replace(own.progress, used=used, nonfinite=next(iter(bad), None)))


def with_way(state: TrainState, way: UnderWay) -> TrainState:
    """Return a state that is so far on its way."""
    window = replace(
        state.window, is_open=way.is_open, length=way.length, is_settled=way.is_settled
    )
    return state.replace(window=window, progress=way.progress)
