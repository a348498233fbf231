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
from itertools import takewhile

from fzero.state import residency
from fzero.state.effects import Effect, Reduce, replaced
from fzero.state.residency import Residency
from fzero.state.schedule import PlannedProgram, Program, plan_program


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


Effects = tuple[Effect, ...]
Next = tuple[Replay, Residency, Effects]


def begin(program: Program, r: Residency) -> Replay:
    """Return the place before the first use in the plan of a program, see `schedule.plan`.

    What is pinned needs no gather in it. The number behind those of the units is the sync point,
    for which nothing is gathered.
    """
    sync_point = len(r.units.numels)
    held = r.pinned.union([sync_point])
    steps = plan_program(program, (*r.units.numels, 0), held, r.units.limits)
    return Replay(plan=steps, sync_point=sync_point)


def use(replay: Replay, r: Residency, unit: int) -> Next | None:
    """Go to the next use of a unit before the next sync point; None if the plan has none.

    To a unit that is gathered the walk goes by one step at most, and not beyond uses which are
    still to come on this rank.

    Example:
        >>> from fzero.state.residency import Units
        >>> here = Residency(model=1, units=Units(numels=(4, 4)))
        >>> replay = begin(Program((0, 1, ~1, ~0)), here)
        >>> replay, here, effects = use(replay, here, 0)
        >>> [(type(effect).__name__, effect.unit) for effect in effects]
        [('Gather', 0), ('Gather', 1)]
        >>> [(type(effect).__name__, effect.unit) for effect in to_sync_point(replay, here)[2]]
        [('Free', 0), ('Reduce', 1), ('Reduce', 0)]
    """
    place = replay.plan.next_use(unit, replay.at)
    sync_point = replay.plan.next_use(replay.sync_point, replay.at)
    if place is None or (sync_point is not None and place > sync_point):
        return None
    if place != replay.at + 1 and unit in r.gathered:
        return replay, r, ()
    return _walk(replay, r, place)


def start_ready(
    replay: Replay, r: Residency, complete: Collection[int] = (), most: int | None = None
) -> Next:
    """Start the reductions of this step that are ready, in its order, `most` of them.

    complete: units whose gradients are complete on this rank from here on.
    """
    ready = replay.ready.union(complete) if complete else replay.ready
    units: list[int] = []
    if not replay.waits:  # the next ones of this step, up to the first one that is not ready
        units = list(takewhile(ready.__contains__, _rest(replay)))[:most]
    if units or complete:
        started = replay.started + len(units)
        replay = replaced(replay, started=started, ready=ready.difference(units))
    return replay, r, tuple(Reduce(r.model, unit) for unit in units)


def to_sync_point(replay: Replay, r: Residency) -> tuple[Replay | None, Residency, Effects]:
    """Go to the next sync point, or to the end of the plan, which leaves None."""
    if replay.waits:
        return replay, r, ()
    sync_point = replay.plan.next_use(replay.sync_point, replay.at)
    if sync_point is not None:
        return _walk(replay, r, sync_point)
    replay, r, effects = _walk(replay, r, len(replay.plan.steps) - 1)
    return None, r, (*effects, *(Reduce(r.model, unit) for unit in _rest(replay)))


def gather_beside(replay: Replay, r: Residency, unit: int) -> Next:
    """Note a unit that is gathered beside the plan, while this rank waits at a sync point.

    Of those that were gathered so before, the last one stays.
    """
    before = replay.gathered_here
    r, frees = residency.free(r, before[:-1])
    return replaced(replay, gathered_here=(*before[-1:], unit)), r, frees


def leave_sync_point(replay: Replay, r: Residency) -> Next:
    """Leave the sync point with all ranks; free units that were gathered for another rank there.

    What is ready starts behind the user's collective: ranks that are in it cannot be waited for.
    """
    return free_beside(replaced(replay, waits=False), r)


def free_beside(replay: Replay, r: Residency) -> Next:
    """Free the units that were gathered beside the plan."""
    r, frees = residency.free(r, replay.gathered_here)
    return replaced(replay, gathered_here=()), r, frees


def _walk(replay: Replay, r: Residency, place: int) -> Next:
    collected: list[Effect] = []
    for at in range(replay.at + 1, place + 1):
        step, rest = replay.plan.steps[at], _rest(replay)
        r, frees = residency.free(r, step.frees)
        collected += (*frees, *(Reduce(r.model, u) for u in rest))  # gradients take room
        for unit in (*step.gathers, *step.ahead):
            r, starts = residency.gather(r, unit)
            collected += starts
        ready, waits = replay.ready.difference(rest), step.unit == replay.sync_point
        replay = replaced(replay, at=at, started=0, ready=ready, waits=waits)
        replay, r, reduces = start_ready(replay, r)
        collected += reduces
    return replay, r, tuple(collected)


def _rest(replay: Replay) -> tuple[int, ...]:
    """Units of this step whose reductions have not started, ready or not."""
    return replay.plan.steps[replay.at].reduces[replay.started :]
