"""The plan of a model: how it is agreed on and followed, and what is asked for beside it."""

from __future__ import annotations

from fzero.state import replay, residency
from fzero.state._replaced import replaced
from fzero.state.effects import Effect, Look, Read, Reduce
from fzero.state.protocol._rounds import differ, say, serve
from fzero.state.protocol.events import Ready, Use
from fzero.state.protocol.records import Next, Protocol
from fzero.state.replay import Replay
from fzero.state.residency import Residency
from fzero.state.rounds import MANY, Asked, MessageKind, Round, What, asking
from fzero.state.schedule import Program

LIVE = 2
"""Units gathered at once while a rank asks: the one in use, and the one before it."""

# What the ranks announced.


def learn(p: Protocol, number: int) -> Next:
    """Read what was announced, if it was not read."""
    return (p.then((learned, number)), (Read(),)) if p.open == number else (p, ())


def learned(p: Protocol, number: int, said: Round) -> Next:
    """Follow the plan if all ranks announced the same, in the same order; else ask.

    All ranks then ask, also those of a rank that is done or makes a call, and so is not in this
    pass. What ranks ask for that are still in the pass before is served first.
    """
    if MessageKind.ASK in said.kinds:
        p, effects = serve(p, said)
        assert p.posted is not None
        again, more = say(p, p.posted, (learned, number))
        return again, (*effects, *more)
    if not said.is_same and not said.is_served:
        return differ(p)
    p = replaced(p, open=None)
    model, course = p.models[number], p.models[number].course
    program = course.announcement and course.announcement.program
    if program is not None and said.is_same and said.is_in_order:
        return p.then((pin_persistent, number), (follow, number, program)), ()
    p = p.put(number, course=replaced(course, asked=True))
    here = model.residency
    missing = tuple(u for u in model.units.persistent if u not in here.gathered)
    asks = [(ask, number, model.gather, missing)] if missing else []
    return p.then(*asks, (pin_persistent, number)), ()


def pin_persistent(p: Protocol, number: int) -> Next:
    """Gather the missing persistent units, and pin all of them."""
    resident, collected = p.models[number].residency, list[Effect]()
    units = resident.units.persistent
    for unit in units:
        resident, starts = residency.gather(resident, unit)
        collected += starts
    resident, waits = residency.wait(residency.pin(resident, units), units)
    resident = replaced(resident, seen=resident.seen.union(units))
    return p.holding(number, (resident, (*collected, *waits)))


def follow(p: Protocol, number: int, program: Program) -> Next:
    """Begin the plan of a program."""
    model = p.models[number]
    place = replay.begin(program, model.residency)
    return p.put(number, course=replaced(model.course, replay=place)), ()


# Asking.


def ask(p: Protocol, number: int, what: What, units: tuple[int, ...]) -> Next:
    """Ask all ranks to take part, after the plans of other models have come to their ends."""
    return p.then((end_others, number), (ask_now, number, what, units)), ()


def ask_now(p: Protocol, number: int, what: What, units: tuple[int, ...]) -> Next:
    """Ask in the next round."""
    return say(p, asking(number, what, units), (asked, number, what, units))


def asked(p: Protocol, number: int, what: What, units: tuple[int, ...], said: Round) -> Next:
    """Take part in what any rank asked for in this round; ask for what was not in it."""
    p, effects = serve(p, said, frozenset(Asked(number, what, unit) for unit in units))
    rest = tuple(unit for unit in units if Asked(number, what, unit) not in said.asked)
    return p.then(*[(ask_now, number, what, rest)] * bool(rest)), effects


# Uses.


def use(p: Protocol, e: Use) -> Next:
    """A kernel reads a unit."""
    if p.models[e.model].residency.is_current(e.unit):
        return p, ()
    if p.open == e.model:
        return p.then((learn, e.model), (reach, e.model, e.unit)), ()
    return reach(p, e.model, e.unit)


def reach(p: Protocol, number: int, unit: int) -> Next:
    """Record the use of a unit, and go to it in the plan, which gathers it ahead of its use."""
    model = p.models[number]
    resident, frees = model.residency, tuple[Effect, ...]()
    if not model.rounds:  # a read outside of a pass, of a unit that the pass has rounded
        resident, frees = residency.drop_inexact(resident, [unit])
    resident, course = residency.touch(resident, unit), model.course
    if unit not in resident.seen:
        course = course.did_also(unit)
        if model.units.limits.keeps:
            resident = replaced(resident, seen=resident.seen | {unit})
    if course.replay is None or course.replay.waits:
        p = p.put(number, residency=resident, course=course)
        return p.then((obtain, number, unit)), frees
    there = replay.use(course.replay, resident, unit)
    if there is None and not resident.has(unit):
        # It is asked for at the next sync point, or at the end of the plan.
        p = p.put(number, residency=resident, course=replaced(course, asked=True))
        return p.then((walk, number), (obtain, number, unit)), frees
    # The plan is followed: nobody has to be asked on the way.
    place, resident, effects = there or (course.replay, resident, ())
    resident, waits = residency.wait(resident, [unit])
    p = p.put(number, residency=resident, course=replaced(course, replay=place))
    return p, (*frees, *effects, *waits)


def obtain(p: Protocol, number: int, unit: int) -> Next:
    """Wait for a unit; ask the other ranks for it first unless it is gathered or in flight."""
    model, resident = p.models[number], p.models[number].residency
    if resident.has(unit):
        return p.holding(number, residency.wait(resident, [unit]))
    if model.course.replay is None:
        loose = [unit for unit in resident.gathered if unit not in resident.pinned]
        oldest = loose[: max(0, len(loose) - LIVE + 1)]
        p, frees = p.holding(number, residency.free(resident, oldest))
    else:  # the rest of what is here belongs to the plan
        p, frees = go_on(p, number, replay.gather_beside(model.course.replay, resident, unit))
    return p.then((ask, number, model.gather, (unit,)), (obtain, number, unit)), frees


# Reductions.


def ready(p: Protocol, e: Ready) -> Next:
    """The gradients of a unit are complete: reduce it.

    Below stage 3, while another rank has not begun its backward, this one goes on with its own,
    with one bucket to scatter at most; with any number where it may not wait.
    """
    model = p.models[e.model]
    if model.phase.deferred:  # it is left at the end
        return p, ()
    units, course = model.units, model.course.did_also(~e.unit)
    due = *course.due, e.unit
    p = p.put(e.model, course=replaced(course, due=due))
    few = model.may_not_wait or sum(unit in units.bounded for unit in due) <= 1
    may_wait = not units.gathers and few
    if p.open == e.model and may_wait:
        return p.then((looked, e.model)), (Read(waits=False),)
    return p.then((learn, e.model), (reduce_due, e.model)), ()


def looked(p: Protocol, number: int, said: Round | None) -> Next:
    """Reduce what is due if every rank has begun its backward."""
    return (p, ()) if said is None else learned(p.then((reduce_due, number)), number, said)


def reduce_due(p: Protocol, number: int) -> Next:
    """Start the reductions that are due as the plan has them, or ask for them."""
    model, course = p.models[number], p.models[number].course
    p = p.put(number, course=replaced(course, due=()))
    if course.replay is None or course.replay.waits:  # the others come to a round
        return p.then((ask, number, What.REDUCE, course.due)), ()
    place = replay.complete(course.replay, course.due)
    if model.may_not_wait:
        p = p.put(number, course=replaced(p.models[number].course, replay=place))
        return p.then((look, number)), ()
    return go_on(p, number, replay.start_ready(place, model.residency))


def look(p: Protocol, number: int) -> Next:
    """Start what is ready for as long as no reduction has to wait for another one."""
    place = p.models[number].course.replay
    if place is None or not replay.has_ready(place):
        return p, ()
    return p.then((start_one, number)), (Look(number),)


def start_one(p: Protocol, number: int, said: tuple[()] | None) -> Next:
    """Start one reduction if it need not wait; what is left starts later, at the end at last."""
    model = p.models[number]
    if said is None or model.course.replay is None:
        return p, ()
    one = replay.start_ready(model.course.replay, model.residency, most=1)
    return go_on(p.then((look, number)), number, one)


def start_up_to(p: Protocol, reducible: tuple[int, ...]) -> Next:
    """Start as many reductions of a model as every rank can: no rank is kept waiting for one.

    reducible: `Protocol.reducible` of each rank.
    """
    number, count = divmod(min(reducible), MANY)
    if not count or any(code // MANY != number for code in reducible):
        return p, ()
    model, course = p.models[number], p.models[number].course
    assert course.replay is not None
    place = replay.complete(course.replay, course.due)
    p = p.put(number, course=replaced(course, due=()))
    most = max(0, count - place.started)
    return go_on(p, number, replay.start_ready(place, model.residency, most=most))


# The way through a plan, and its end.


def walk(p: Protocol, number: int) -> Next:
    """Run the plan to its next sync point, or to its end."""
    model, course = p.models[number], p.models[number].course
    if course.due:
        return p.then((reduce_due, number), (walk, number)), ()
    if course.replay is None:
        return p, ()
    return go_on(p, number, replay.to_sync_point(course.replay, model.residency))


def end_plan(p: Protocol, number: int) -> Next:
    """Run the plan to its end, or to a sync point that this phase never reached."""
    return p.then((learn, number), (walk, number), (close_plan, number)), ()


def close_plan(p: Protocol, number: int) -> Next:
    """Leave the plan unfinished: this phase did something else."""
    course = p.models[number].course
    if course.replay is None:
        return p, ()
    return p.put(number, course=replaced(course, replay=None, asked=True)), ()


def end_others(p: Protocol, number: int) -> Next:
    """End the plans of all other models: one plan runs at a time."""
    return p.then(*((end_plan, other) for other in p.running if other != number)), ()


def go_on(
    p: Protocol, number: int, to: tuple[Replay | None, Residency, tuple[Effect, ...]]
) -> Next:
    """Be at another place of the plan; what it has reduced on the way is not left any more."""
    place, resident, effects = to
    course = replaced(p.models[number].course, replay=place)
    if course.left:
        reduced = {effect.unit for effect in effects if isinstance(effect, Reduce)}
        course = replaced(course, left=tuple(x for x in course.left if x[0] not in reduced))
    return p.put(number, course=course, residency=resident), effects
