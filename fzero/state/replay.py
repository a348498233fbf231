"""One rank's place in a plan of the schedule, and which collectives its next event starts.

All ranks that replay one plan start its gathers and reductions in one order, whatever they use
themselves: a rank that does not use a unit takes part in its gather all the same, one that has no
gradient of a unit reduces zeros (a sum is linear: what comes later is reduced later).

A collective of the user's is a step of the plan, its sync point: the walk waits there until all
ranks have come.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fzero.state._replaced import replaced
from fzero.state.effects import FreeUnit, GatherUnit, PlanEffect, ReduceUnit
from fzero.state.schedule import Limits, PlannedProgram, Program, plan_program


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A place in a plan.

    Attributes:
        plan: what is replayed.
        sync_point: the event of a collective of the user's.
        at: the step that runs; 0 is before the first use.
        started: how many reductions of that step have started.
        ready: units whose gradients are complete on this rank, and are not reduced yet.
        waits: whether the step is a sync point to which some rank may not have come yet.
        gathered_here: units that were gathered at this sync point, beside the plan.
    """

    plan: PlannedProgram
    sync_point: int
    at: int = 0
    started: int = 0
    ready: frozenset[int] = frozenset()
    waits: bool = False
    gathered_here: tuple[int, ...] = ()


Effects = tuple[PlanEffect, ...]
Next = tuple[Replay, Effects]


def begin(
    program: Program, numels: tuple[int, ...], held: frozenset[int], limits: Limits
) -> Replay:
    """Return the place before the first use in the plan of a program, see `schedule.plan`.

    The number behind those of the units is the sync point, for which nothing is gathered.
    """
    sync_point = len(numels)
    steps = plan_program(program, (*numels, 0), held.union([sync_point]), limits)
    return Replay(plan=steps, sync_point=sync_point)


def use(replay: Replay, unit: int, *, held: bool) -> Next | None:
    """Go to the next use of a unit before the next sync point; None if the plan has none.

    `held`: the unit is whole, so that the walk goes on by one step at most, and not beyond uses
    which are still to come on this rank.

    Example:
        >>> replay = begin(Program((0, 1, ~1, ~0)), (4, 4), frozenset(), Limits())
        >>> replay, effects = use(replay, 0, held=False)
        >>> effects
        (GatherUnit(unit=0), GatherUnit(unit=1))
        >>> to_sync_point(replay)
        (None, (FreeUnit(unit=0), ReduceUnit(unit=1), ReduceUnit(unit=0)))
    """
    place, sync_point = replay.plan.next_use(unit, replay.at), _next_sync_point(replay)
    if place is None or (sync_point is not None and place > sync_point):
        return None
    if place != replay.at + 1 and held:
        return replay, ()
    return _walk(replay, place)


def complete(replay: Replay, units: Collection[int]) -> Replay:
    """The gradients of these units are complete on this rank."""
    return replaced(replay, ready=replay.ready.union(units)) if units else replay


def start_ready(replay: Replay) -> Next:
    """Start the reductions of this step that are ready, in its order."""
    effects = _ready_now(replay)
    if not effects:
        return replay, ()
    ready = replay.ready.difference(effect.unit for effect in effects)
    return replaced(replay, started=replay.started + len(effects), ready=ready), effects


def to_sync_point(replay: Replay) -> tuple[Replay | None, Effects]:
    """Go to the next sync point, or to the end of the plan, which leaves None."""
    if replay.waits:
        return replay, ()
    sync_point = _next_sync_point(replay)
    if sync_point is not None:
        return _walk(replay, sync_point)
    replay, effects = _walk(replay, len(replay.plan.steps) - 1)
    return None, (*effects, *_rest(replay))


def gather_beside(replay: Replay, unit: int) -> Next:
    """Gather a unit beside the plan, while this rank waits at a sync point.

    Of those that were gathered so before, the last one stays.

    Example:
        >>> place = begin(Program((2, 0)), (4, 4), frozenset(), Limits())  # 2 is the sync point
        >>> place, _ = to_sync_point(place)
        >>> place, _ = gather_beside(place, 0)
        >>> gather_beside(gather_beside(place, 1)[0], 0)[1]
        (FreeUnit(unit=0),)
    """
    before = replay.gathered_here
    frees = tuple(FreeUnit(one) for one in before[:-1])
    return replaced(replay, gathered_here=(*before[-1:], unit)), frees


def leave_sync_point(replay: Replay) -> Next:
    """Leave the sync point with all ranks; free units that were gathered for another rank there."""
    replay, frees = free_beside(replay)
    replay, reduces = start_ready(replaced(replay, waits=False))
    return replay, (*frees, *reduces)


def free_beside(replay: Replay) -> Next:
    """Free the units that were gathered beside the plan."""
    frees = tuple(FreeUnit(unit) for unit in replay.gathered_here)
    return replaced(replay, gathered_here=()), frees


def _next_sync_point(replay: Replay) -> int | None:
    return replay.plan.next_use(replay.sync_point, replay.at)


def _walk(replay: Replay, place: int) -> Next:
    collected: list[PlanEffect] = []
    for at in range(replay.at + 1, place + 1):
        step = replay.plan.steps[at]
        collected += [FreeUnit(unit) for unit in step.frees]  # first: gradients take room
        reduces = _rest(replay)
        collected += reduces
        collected += [GatherUnit(unit) for unit in (*step.gathers, *step.ahead)]
        replay, started = start_ready(
            replaced(
                replay,
                at=at,
                started=0,
                ready=replay.ready.difference(effect.unit for effect in reduces),
                waits=step.unit == replay.sync_point,
            )
        )
        collected += started
    return replay, tuple(collected)


def _rest(replay: Replay) -> tuple[ReduceUnit, ...]:
    """The reductions of this step that have not started, ready or not."""
    reduces = replay.plan.steps[replay.at].reduces
    return tuple(ReduceUnit(unit) for unit in reduces[replay.started :])


def _ready_now(replay: Replay) -> tuple[ReduceUnit, ...]:
    """The next reductions of this step, up to the first one that is not ready."""
    if replay.waits:
        return ()
    collected = []
    for effect in _rest(replay):
        if effect.unit not in replay.ready:
            break
        collected.append(effect)
    return tuple(collected)
