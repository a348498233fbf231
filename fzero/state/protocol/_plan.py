"""Tasks of one model: its plan, the units that it uses, the reductions that are due."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.state import replay, residency
from fzero.state._replaced import replaced
from fzero.state.effects import Effect, FreeUnit, GatherUnit, PlanEffect, Reduce, ReduceUnit
from fzero.state.protocol import _tasks as tasks
from fzero.state.protocol.events import Call, Ready, SyncPoint, Use
from fzero.state.protocol.records import Course, Model, Next, Protocol
from fzero.state.replay import Replay
from fzero.state.residency import Residency
from fzero.state.rounds import What

LIVE = 2
"""Units gathered at once while a rank asks: the one in use, and the one before it."""

SYNC = "a collective of the user's (psum, all_gather, ...)"


def use(p: Protocol, e: Use) -> Next:
    """A kernel reads a unit."""
    resident = p.models[e.model].residency
    if e.unit == resident.current and e.unit in resident.gathered:
        return p, ()
    there = tasks.Reach(e.model, e.unit)
    return (p.then(tasks.Learn(e.model), there), ()) if p.open == e.model else reach(p, there)


def reach(p: Protocol, t: tasks.Reach) -> Next:
    """Record the use of a unit, and go to it in the plan, which gathers it ahead of its use."""
    model, unit = p.models[t.model], t.unit
    resident, frees = model.residency, tuple[Effect, ...]()
    if not model.rounds:  # a read outside of a pass, of a unit that the pass has rounded
        resident, frees = residency.drop_inexact(resident, t.model, [unit])
    held = unit in resident.gathered
    resident, course = residency.touch(resident, unit), model.course
    if unit not in resident.seen:
        course = course.did_also(unit)
        if model.units.limits.keeps:
            resident = replaced(resident, seen=resident.seen | {unit})
    if course.replay is None or course.replay.waits:
        p = p.put(t.model, replaced(model, residency=resident, course=course))
        return p.then(tasks.Obtain(t.model, unit)), frees
    there = replay.use(course.replay, unit, held=held)
    if there is None and not resident.has(unit):
        # It is asked for at the next sync point, or at the end of the plan.
        course = replaced(course, asked=True)
        p = p.put(t.model, replaced(model, residency=resident, course=course))
        return p.then(tasks.Walk(t.model), tasks.Obtain(t.model, unit)), frees
    # The plan is followed: nobody has to be asked on the way.
    place, planned = there or (course.replay, ())
    course = replaced(course, replay=place)
    resident, course, effects = _done(model, t.model, resident, course, planned)
    resident, waits = residency.wait(resident, t.model, [unit])
    p = p.put(t.model, replaced(model, residency=resident, course=course))
    return p, (*frees, *effects, *waits)


def obtain(p: Protocol, t: tasks.Obtain) -> Next:
    """Wait for a unit; ask the other ranks for it first unless it is gathered or in flight."""
    model, resident = p.models[t.model], p.models[t.model].residency
    if resident.has(t.unit):
        resident, waits = residency.wait(resident, t.model, [t.unit])
        return p.put(t.model, replaced(model, residency=resident)), waits
    if model.course.replay is None:
        loose = [unit for unit in resident.gathered if unit not in resident.pinned]
        oldest = loose[: max(0, len(loose) - LIVE + 1)]
        resident, frees = residency.free(resident, t.model, oldest)
        p = p.put(t.model, replaced(model, residency=resident))
    else:  # the rest of what is here belongs to the plan
        p, frees = go_on(p, t.model, replay.gather_beside(model.course.replay, t.unit))
    return p.then(tasks.Ask(t.model, model.gather, (t.unit,)), t), frees


def ready(p: Protocol, e: Ready) -> Next:
    """The gradients of a unit are complete: reduce it.

    Below stage 3, while another rank has not begun its backward, this one goes on with its own,
    with one bucket to scatter at most.
    """
    model = p.models[e.model]
    course = replaced(model.course.did_also(~e.unit), due=(*model.course.due, e.unit))
    p = p.put(e.model, replaced(model, course=course))
    waits = not model.units.gathers and p.open == e.model and not e.answered
    if waits and sum(unit in model.units.bounded for unit in course.due) <= 1:
        return p, ()
    return p.then(tasks.Learn(e.model), tasks.ReduceDue(e.model)), ()


def reduce_due(p: Protocol, t: tasks.ReduceDue) -> Next:
    """Start the reductions that are due as the plan has them, or ask for them."""
    model, course = p.models[t.model], p.models[t.model].course
    p = p.put(t.model, replaced(model, course=replaced(course, due=())))
    if course.replay is None or course.replay.waits:  # the others come to a round
        return p.then(tasks.Ask(t.model, What.REDUCE, course.due)), ()
    return go_on(p, t.model, replay.start_ready(replay.complete(course.replay, course.due)))


def walk(p: Protocol, t: tasks.Walk) -> Next:
    """Run the plan to its next sync point, or to its end."""
    course = p.models[t.model].course
    if course.due:
        return p.then(tasks.ReduceDue(t.model), t), ()
    return (
        (p, ()) if course.replay is None else go_on(p, t.model, replay.to_sync_point(course.replay))
    )


def end_plan(p: Protocol, t: tasks.EndPlan) -> Next:
    """Run the plan to its end, or to a sync point that this phase never reached."""
    return p.then(tasks.Learn(t.model), tasks.Walk(t.model), tasks.ClosePlan(t.model)), ()


def close_plan(p: Protocol, t: tasks.ClosePlan) -> Next:
    """Leave the plan unfinished: this phase did something else."""
    model, course = p.models[t.model], p.models[t.model].course
    if course.replay is None:
        return p, ()
    return p.put(t.model, replaced(model, course=replaced(course, replay=None, asked=True))), ()


def end_others(p: Protocol, t: tasks.EndOthers) -> Next:
    """End the plans of all other models: one plan runs at a time."""
    return p.then(*(tasks.EndPlan(number) for number in p.running if number != t.model)), ()


def sync_point(p: Protocol, e: SyncPoint) -> Next:
    """Run the plan to its sync point, and wait for ranks there: they serve each other until then.

    It is recorded like the use of a unit that is always here. Below stage 3 reductions start in one
    order, over a group of their own: nobody waits.
    """
    if not p.models[e.model].units.gathers:
        return p, ()
    return p.then(tasks.Learn(e.model), tasks.Arrive(e.model, e.values)), ()


def arrive(p: Protocol, t: tasks.Arrive) -> Next:
    """Arrive at the sync point, and wait for the other ranks there."""
    model = p.models[t.model]
    course = model.course.did_also(len(model.units.numels))
    had_plan = course.replay is not None
    resident = replaced(model.residency, current=-1)
    p = p.put(t.model, replaced(model, course=course, residency=resident))
    return p.then(
        tasks.Walk(t.model),
        tasks.EndOthers(t.model),
        tasks.Meet(t.model, t.values),
        tasks.Depart(t.model, had_plan),
    ), ()


def meet(p: Protocol, t: tasks.Meet) -> Next:
    """Wait for the other ranks; say whether this one is at a sync point of a plan."""
    has_plan = p.models[t.model].course.replay is not None
    return p.then(Call(SYNC, t.values, has_plan)), ()


def depart(p: Protocol, t: tasks.Depart) -> Next:
    """Leave the sync point: from here on all ranks follow one order again."""
    model, course = p.models[t.model], p.models[t.model].course
    if course.replay is not None and p.met:
        return go_on(p, t.model, replay.leave_sync_point(course.replay))
    if course.replay is not None:  # a rank that came from another pass does not follow the plan
        p, frees = go_on(p, t.model, replay.free_beside(course.replay))
        return p.then(tasks.ClosePlan(t.model)), frees
    asked = course.asked or t.had_plan  # which did not have this sync point
    return p.put(t.model, replaced(model, course=replaced(course, asked=asked))), ()


def go_on(p: Protocol, number: int, to: tuple[Replay | None, Sequence[PlanEffect]]) -> Next:
    """Go to a place of the plan, and start the collectives that it has there."""
    model = p.models[number]
    course = replaced(model.course, replay=to[0])
    resident, course, effects = _done(model, number, model.residency, course, to[1])
    return p.put(number, replaced(model, residency=resident, course=course)), effects


def _done(
    model: Model, number: int, resident: Residency, course: Course, planned: Sequence[PlanEffect]
) -> tuple[Residency, Course, tuple[Effect, ...]]:
    """Translate the steps of a plan into a new residency and effects."""
    collected: list[Effect] = []
    for effect in planned:
        match effect:
            case GatherUnit(unit):
                resident, more = started(model, resident, number, unit)
                collected += more
            case FreeUnit(unit):
                resident, more = residency.free(resident, number, [unit])
                collected += more
            case ReduceUnit(unit):
                if course.left:
                    left = tuple(x for x in course.left if x[0] != unit)
                    course = replaced(course, left=left)
                collected.append(Reduce(number, unit))
    return resident, course, tuple(collected)


def started(
    model: Model, resident: Residency, number: int, unit: int
) -> tuple[Residency, tuple[Effect, ...]]:
    """Start to gather a unit, which is then pinned if what is gathered stays for the backward."""
    if model.units.limits.keeps:
        resident = residency.pin(resident, [unit])
    return residency.start(resident, number, unit, inexact=model.is_inexact(unit))
