"""What each event does: a pass from its beginning to its end, its plan, calls, rounds, errors.

The functions of events (`begin`, `use`, `ready`, `sync_point`, `finish`, ...) come first in their
part; what they leave to do stands below them. `p` is the record, `number` that of a model.
"""

from __future__ import annotations

import zlib
from typing import Any

from fzero.state import pass_state, replay, residency
from fzero.state.effects import (
    Discard,
    Drop,
    Effect,
    Exchange,
    Look,
    Post,
    Raise,
    Read,
    Receive,
    Reduce,
    TakePart,
    WaitForReductions,
    replaced,
)
from fzero.state.pass_state import FORWARD, PassState
from fzero.state.protocol.events import (
    Begin,
    Call,
    Changed,
    EndForward,
    Failed,
    Finish,
    FirstGradient,
    GiveUp,
    Join,
    Leave,
    Met,
    Noted,
    Pin,
    Raised,
    Ready,
    SyncPoint,
    Unpin,
    Use,
)
from fzero.state.protocol.records import (
    NO_LOCAL_CALLS,
    Course,
    LocalCalls,
    Model,
    Next,
    Protocol,
    Task,
)
from fzero.state.replay import Replay
from fzero.state.residency import Residency
from fzero.state.rounds import (
    ASKED,
    BROUGHT,
    MANY,
    Asked,
    Message,
    MessageKind,
    Round,
    What,
    asking,
)
from fzero.state.schedule import joined


def join(p: Protocol, event: Join) -> Next:
    """Register a model."""
    here = residency.carried(event.model, event.units, event.gathered)
    return replaced(p, models={**p.models, event.model: Model(residency=here)}), ()


def leave(p: Protocol, event: Leave) -> Next:
    """Forget a model."""
    models = {number: model for number, model in p.models.items() if number != event.model}
    return replaced(p.without(event.model), models=models), ()


# Its beginning.


def begin(p: Protocol, event: Begin) -> Next:
    """Begin a forward or backward; announce it if it gathers or reduces anything."""
    number, model = event.model, p.models[event.model]
    here, frees = replaced(model.residency, stays=event.stays, rounds=event.rounds), ()
    if not event.rounds:  # a window may have brought rounded values
        here, frees = residency.drop_inexact(here, here.gathered)
    reads = model.units.gathers and len(here.pinned) < len(model.units.numels)
    if event.announcement.place[1] == FORWARD:
        p = replaced(p, known=False)  # an error of the pass before does not concern this one
        to = pass_state.begin_forward(model.phase, reads=reads, sums=event.sums, calls=p.calls)
    else:
        to = pass_state.begin_backward(
            model.phase,
            reads=reads,
            sums=event.sums,
            silent=event.silent,
            dropped=event.dropped,
            late=int(number in p.late),
        )
    course = replaced(model.course, announcement=event.announcement)
    return _announced(p.put(number, course=course, residency=here), number, to), frees


def first_gradient(p: Protocol, event: FirstGradient) -> Next:
    """Announce a silent backward, which now has a gradient to reduce."""
    to = pass_state.first_gradient(p.models[event.model].phase)
    return _announced(p, event.model, to), ()


def _announced(p: Protocol, number: int, to: pass_state.Next) -> Protocol:
    p, is_announced = p.put(number, phase=to[0]), to[1]
    if is_announced and p.defers(number):
        return p.put(number, phase=pass_state.defer(to[0]))
    return p.then(*ends_of_others(p, number), (announce, number)) if is_announced else p


def announce(p: Protocol, number: int) -> Next:
    """Post the announcement of a phase; its answer is read when a collective depends on it."""
    model, said = p.models[number], p.models[number].course.announcement
    assert said is not None
    course = replaced(model.course, did={**model.course.did, said.place: ()}, place=said.place)
    here, frees = residency.release(replaced(model.residency, current=-1))
    # What is here already is part of what ranks must have in common to follow one plan.
    facts = said.program and (said.program.digest, sorted(here.pinned))
    expected = facts, model.units.gathers or model.phase.calls
    message = Message(
        MessageKind.PASS,
        f"{said.text}\nphase {said.place[1]}{'' if said.served else p.noted.said}",
        hint=zlib.crc32(repr(expected).encode()),
        served=said.served,
    )
    p = p.put(number, course=course, residency=here).without(number)
    p = replaced(p, running=(*p.running, number), open=number, posted=message, known=False)
    return p, (*frees, Post(message))


# Its end.


def end_forward(p: Protocol, event: EndForward) -> Next:
    """A forward is over that a backward may follow."""
    number = event.model
    ends = ((end_plan, number),) if p.models[number].phase.announced else ()
    return p.then(*ends, (end_of_forward, number)), ()


def end_of_forward(p: Protocol, number: int) -> Next:
    """Free what the forward gathered, unless it stays for the backward."""
    model = p.models[number]
    phase, course = pass_state.end_forward(model.phase), replaced(model.course, place=None)
    here, frees = _at_rest(model), tuple[Effect, ...]()
    if model.phase.announced:
        p = p.without(number)
        here, frees = residency.release(here)
    return p.put(number, phase=phase, course=course, residency=here), frees


def _at_rest(model: Model) -> residency.Residency:
    """No unit is current, for its values may be rounded: a read outside of a pass is exact."""
    return replaced(model.residency, current=-1, rounds=False)


def finish(p: Protocol, event: Finish) -> Next:
    """A backward is over, or a forward that none follows."""
    number, model = event.model, p.models[event.model]
    if model.phase.deferred and not model.phase.announced:
        phase, _ = pass_state.first_gradient(model.phase)
        return p.put(number, phase=phase).then(
            *ends_of_others(p, number), (announce, number), (finish, event)
        ), ()
    phase, is_ended = pass_state.finish(model.phase)
    course = replaced(model.course, left=event.left, brings=event.brings, learned={})
    stays = ((settle, number),) if model.residency.stays else ()
    if not is_ended:
        p = p.put(number, phase=phase, course=course, residency=_at_rest(model))
        return p.then(*stays), ()
    # Recorded here, for the rest of the plan may reduce them: else it would be forgotten next time.
    for unit in (unit for unit, complete in event.left if not complete):
        course = course.did_also(~unit)
    # Where ranks may not wait for reductions, they wait for each other in a round before the last
    # ones. A rank that raised says so there: until then it starts none.
    meets = ((read_announcement, number), (say_end, number)) if model.may_not_wait else ()
    p = p.put(number, phase=phase, course=course)
    ends = (end_plan, number), (ask_left, number), *ends_of_others(p, number)
    return p.then(*meets, *ends, (say_done, number), *stays), ()


def say_end(p: Protocol, number: int) -> Next:
    """Say that this rank has no more gradients, if all ranks follow one plan."""
    course = p.models[number].course
    if course.replay is None:
        return p, ()
    return say(p, Message(MessageKind.DONE, hint=BROUGHT * course.brings), (heard_end,))


def heard_end(p: Protocol, _: Round) -> Next:
    """All ranks have come to the end of their backwards."""
    return p, ()


def ask_left(p: Protocol, number: int) -> Next:
    """At the end of a backward, ask for the reductions that no plan has started."""
    course = p.models[number].course
    if not course.left:
        return p, ()
    units = tuple(unit for unit, _ in course.left)
    p = p.put(number, course=replaced(course, asked=True))
    return p.then((ask, number, What.REDUCE, units)), ()


def say_done(p: Protocol, number: int) -> Next:
    """Say that this rank is done."""
    course = p.models[number].course
    hint = ASKED * course.asked + BROUGHT * course.brings
    return say(p, Message(MessageKind.DONE, hint=hint), (heard_done, number))


def heard_done(p: Protocol, number: int, said: Round) -> Next:
    """Take part in what other ranks need, until no rank is in a pass.

    Then free what was kept for it; tell what it did if any rank has asked.
    """
    if not said.is_over:
        p, effects = serve(p, said)
        return p.then((say_done, number)), effects
    p, effects = over(p, said)
    model = p.models[number]
    if model.course.in_backward and not said.has_brought:
        effects = *effects, Discard(number)
    here, frees = residency.end_backward(_at_rest(model))
    p = p.put(number, course=Course(), residency=here).without(number)
    if not said.has_asked:
        return p, (*effects, *frees)
    told = Exchange((number, dict(model.course.did)))
    return p.then((heard_programs, number)), (*effects, *frees, told)


def heard_programs(p: Protocol, number: int, values: tuple[Any, ...]) -> Next:
    """Learn the programs of all ranks in this pass: the schedule expects them from now on.

    A rank that was in no pass, or in one of another model, has none.
    """
    model = p.models[number]
    mine = [did for one, did in filter(None, values) if one == number]
    learned = joined(mine, len(model.units.numels))
    return p.put(number, course=replaced(model.course, learned=learned)), ()


def settle(p: Protocol, number: int) -> Next:
    """Wait for what stays in a window and is in flight: it may be carried from here."""
    here = p.models[number].residency
    return p.holding(number, residency.wait(here, sorted(here.pinned)))


# An error.


def failed(p: Protocol, event: Failed) -> Next:
    """The pass raised on this rank: end it in step with the others; tell them if they must know."""
    number, model = event.model, p.models[event.model]
    in_step, tells = pass_state.fail(model.phase, known=p.known, astray=event.astray)
    effects: tuple[Effect, ...] = (Drop(number), *(p.undone if in_step else ()))
    p = replaced(p.put(number, course=replaced(model.course, due=())), undone=())
    more = (*ends_of_others(p, number), (raised, Raised())) if tells else ()
    end = ((end_plan, number),) if in_step else ()
    if tells and model.may_not_wait:  # the others wait in a round, or will come to one
        return p.then((read_announcement, number), *more, *end), effects
    return p.then(*end, *more), effects


def give_up(p: Protocol, event: GiveUp) -> Next:
    """Forget the pass."""
    number, model = event.model, p.models[event.model]
    here, frees = residency.release(replaced(model.residency, rounds=False), pinned=True)
    p = p.put(number, phase=PassState(), course=Course(), residency=here).without(number)
    p = replaced(p, undone=(), open=None if p.open == number else p.open)
    return p, (Discard(number), *frees)


LIVE = 2
"""Units gathered at once while a rank asks: the one in use, and the one before it."""

# What the ranks announced.


def read_announcement(p: Protocol, number: int) -> Next:
    """Read what was announced, if it was not read."""
    return (p.then((heard_announcement, number)), (Read(),)) if p.open == number else (p, ())


def heard_announcement(p: Protocol, number: int, said: Round) -> Next:
    """Follow the plan if all ranks announced the same, in the same order; else ask.

    All ranks then ask, also those of a rank that is done or makes a call, and so is not in this
    pass. What ranks ask for that are still in the pass before is served first.
    """
    if MessageKind.ASK in said.kinds:
        p, effects = serve(p, said)
        assert p.posted is not None
        again, more = say(p, p.posted, (heard_announcement, number))
        return again, (*effects, *more)
    if not said.is_same and not said.is_served:
        return differ(p)
    p = replaced(p, open=None)
    model, course = p.models[number], p.models[number].course
    program = course.announcement and course.announcement.program
    if program is not None and said.is_same and said.is_in_order:
        p, effects = pin_persistent(p, number)
        place = replay.begin(program, p.models[number].residency)
        return p.put(number, course=replaced(course, replay=place)), effects
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


# Asking.


def ask(p: Protocol, number: int, what: What, units: tuple[int, ...]) -> Next:
    """Ask all ranks to take part, after the plans of other models have come to their ends."""
    return p.then(*ends_of_others(p, number), (ask_now, number, what, units)), ()


def ask_now(p: Protocol, number: int, what: What, units: tuple[int, ...]) -> Next:
    """Ask in the next round."""
    return say(p, asking(number, what, units), (heard_asks, number, what, units))


def heard_asks(p: Protocol, number: int, what: What, units: tuple[int, ...], said: Round) -> Next:
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
        return p.then((read_announcement, e.model), (use_unit, e.model, e.unit)), ()
    return use_unit(p, e.model, e.unit)


def use_unit(p: Protocol, number: int, unit: int) -> Next:
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
        return p.then((gather_unit, number, unit)), frees
    there = replay.use(course.replay, resident, unit)
    if there is None and not resident.has(unit):
        # It is asked for at the next sync point, or at the end of the plan.
        p = p.put(number, residency=resident, course=replaced(course, asked=True))
        return p.then((run_plan, number), (gather_unit, number, unit)), frees
    # The plan is followed: nobody has to be asked on the way.
    place, resident, effects = there or (course.replay, resident, ())
    resident, waits = residency.wait(resident, [unit])
    p = p.put(number, residency=resident, course=replaced(course, replay=place))
    return p, (*frees, *effects, *waits)


def gather_unit(p: Protocol, number: int, unit: int) -> Next:
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
    return p.then((ask, number, model.gather, (unit,)), (gather_unit, number, unit)), frees


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
        return p.then((heard_first, e.model)), (Read(waits=False),)
    return p.then((read_announcement, e.model), (reduce_due, e.model)), ()


def heard_first(p: Protocol, number: int, said: Round | None) -> Next:
    """Reduce what is due if every rank has begun its backward."""
    if said is None:
        return p, ()
    return heard_announcement(p.then((reduce_due, number)), number, said)


def reduce_due(p: Protocol, number: int) -> Next:
    """Start the reductions that are due as the plan has them, or ask for them."""
    model, course = p.models[number], p.models[number].course
    p = p.put(number, course=replaced(course, due=()))
    if course.replay is None or course.replay.waits:  # the others come to a round
        return p.then((ask, number, What.REDUCE, course.due)), ()
    place = replay.complete(course.replay, course.due)
    if model.may_not_wait:
        p = p.put(number, course=replaced(p.models[number].course, replay=place))
        return p.then((look_for_room, number)), ()
    return go_on(p, number, replay.start_ready(place, model.residency))


def look_for_room(p: Protocol, number: int) -> Next:
    """Start what is ready for as long as no reduction has to wait for another one."""
    place = p.models[number].course.replay
    if place is None or replay.reducible(place) == place.started:
        return p, ()
    return p.then((start_one, number)), (Look(number),)


def start_one(p: Protocol, number: int, said: tuple[()] | None) -> Next:
    """Start one reduction if it need not wait; what is left starts later, at the end at last."""
    model = p.models[number]
    if said is None or model.course.replay is None:
        return p, ()
    one = replay.start_ready(model.course.replay, model.residency, most=1)
    return go_on(p.then((look_for_room, number)), number, one)


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


def run_plan(p: Protocol, number: int) -> Next:
    """Run the plan to its next sync point, or to its end."""
    model, course = p.models[number], p.models[number].course
    if course.due:
        return p.then((reduce_due, number), (run_plan, number)), ()
    if course.replay is None:
        return p, ()
    return go_on(p, number, replay.to_sync_point(course.replay, model.residency))


def end_plan(p: Protocol, number: int) -> Next:
    """Run the plan to its end, or to a sync point that this phase never reached."""
    return p.then((read_announcement, number), (run_plan, number), (close_plan, number)), ()


def close_plan(p: Protocol, number: int) -> Next:
    """Leave the plan unfinished: this phase did something else."""
    course = p.models[number].course
    if course.replay is None:
        return p, ()
    return p.put(number, course=replaced(course, replay=None, asked=True)), ()


def ends_of_others(p: Protocol, number: int) -> list[Task]:
    """What ends the plans of all other models: one plan runs at a time."""
    return [(end_plan, other) for other in p.running if other != number]


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


SYNC = "a collective of the user's (psum, all_gather, ...)"


def call(p: Protocol, e: Call) -> Next:
    """Make one round of a call, in which ranks that are in a pass are served."""
    if p.open is not None:
        return replaced(p, heard=()).then((read_announcement, p.open)), ()
    text = f"{e.text}{p.noted.said}"
    return say(p, Message(MessageKind.CALL, text, int(e.has_plan), codes=e.values), (heard_call,))


def noted(p: Protocol, e: Noted) -> Next:
    """Count a call that the next round compares; one in a loss changes no state of the step."""
    if p.inside:
        return p, ()
    digest, calls = zlib.crc32(e.text.encode(), p.noted.digest), p.noted.calls + 1
    said = f"\nlocal calls before: {calls}, the last {e.text} ({digest:08x})"
    return replaced(p, noted=LocalCalls(calls, digest, said)), ()


def heard_call(p: Protocol, said: Round) -> Next:
    """All are heard if every rank makes this call."""
    if said.kinds <= {MessageKind.PASS, MessageKind.CALL}:
        everybody = MessageKind.PASS not in said.kinds
        if not said.is_same and (everybody or not said.is_served):
            return differ(p)
        if everybody:
            return replaced(p, heard=said.values, met=said.is_in_order), ()
    p = replaced(p, heard=())
    if said.is_over:
        p, effects = over(p, said)
        # Those that end their pass tell what they did, if any of them has asked.
        return p, (*effects, *(Exchange(None),) * said.has_asked)
    return serve(p, said)


def call_of_all(p: Protocol, e: Call) -> Next:
    """Make a call until every rank makes it."""
    return p.then((call, e), (called, e)), ()


def called(p: Protocol, e: Call) -> Next:
    """Go on if all are heard."""
    return (p, ()) if p.heard else call_of_all(p, e)


# Collectives of the user's.


def sync_point(p: Protocol, e: SyncPoint) -> Next:
    """Run the plan to its sync point, and wait for ranks there: they serve each other until then.

    It is recorded like the use of a unit that is always here. Below stage 3 reductions go on beside
    it, over a group of their own; no rank waits for one in a backward until the last has come. The
    first one that only a backward makes ends the plan; later backwards of these models expect one.
    """
    late = list[int]()
    for number in p.inside:
        model = p.models[number]
        if not (e.connects or e.backward or model.phase.runs):
            continue  # a metric, after the forward
        in_backward = model.course.in_backward
        phase = pass_state.saw_call(model.phase, backward=e.backward and in_backward)
        p = p.put(number, phase=phase)
        late += [number] * (in_backward and not model.phase.calls)
    at = p.meeting
    if at:
        reads = [(read_announcement, number) for number in at]
        return p.then(*reads, (enter_sync, at, e.values)), ()
    if not late:
        return p, ()
    # Nobody knew of it: a rank may wait for a reduction of the plan.
    p = replaced(p, late=p.late.union(p.inside))
    return p.then(*((end_plan, n) for n in late if n in p.running)), ()


def met_all(p: Protocol, e: Met) -> Next:
    """All ranks are at the sync point: expect its backward; start what every rank can."""
    for number in p.inside if e.connects else ():
        phase = p.models[number].phase
        if not phase.runs:  # else it was counted, whoever differentiates it
            p = p.put(number, phase=pass_state.saw_call(phase, backward=False))
    return start_up_to(p, e.reducible) if e.reducible else (p, ())


def enter_sync(p: Protocol, at: tuple[int, ...], values: tuple[int, ...]) -> Next:
    """Arrive at the sync point of these models, and wait for the other ranks there."""
    away = list[Task]()
    for number in at:
        model = p.models[number]
        course = model.course.did_also(len(model.units.numels))
        away.append((leave_sync, number, course.replay is not None))
        p = p.put(number, course=course, residency=replaced(model.residency, current=-1))
    ahead = [(run_plan, number) for number in at]
    ends = [(end_plan, number) for number in p.running if number not in at]
    return p.then(*ahead, *ends, (wait_at_sync, at, values), *away), ()


def wait_at_sync(p: Protocol, at: tuple[int, ...], values: tuple[int, ...]) -> Next:
    """Wait for the other ranks; say whether this one is at a sync point of a plan."""
    has_plan = any(p.models[number].course.replay is not None for number in at)
    return call_of_all(p, Call(SYNC, values, has_plan=has_plan))


def leave_sync(p: Protocol, number: int, had_plan: bool) -> Next:
    """Leave the sync point: from here on all ranks follow one order again."""
    model, course = p.models[number], p.models[number].course
    if course.replay is not None and p.met:
        return go_on(p, number, replay.leave_sync_point(course.replay, model.residency))
    if course.replay is not None:  # a rank that came from another pass does not follow the plan
        p, frees = go_on(p, number, replay.free_beside(course.replay, model.residency))
        return p.then((close_plan, number)), frees
    asked = course.asked or had_plan  # which did not have this sync point
    return p.put(number, course=replaced(course, asked=asked)), ()


# Units that are pinned between passes.


def pin(p: Protocol, e: Pin) -> Next:
    """A block holds units exactly; inside of a pass it does not: the pass says what is here."""
    if p.models[e.model].rounds:
        return p, ()
    return p.then(*ends_of_others(p, e.model), (look_for, e.model, e.units)), ()


def look_for(p: Protocol, number: int, units: tuple[int, ...]) -> Next:
    """Free rounded values of the units; ask all ranks whether one is missing on any of them."""
    p, frees = p.holding(number, residency.drop_inexact(p.models[number].residency, units))
    missing = any(unit not in p.models[number].residency.gathered for unit in units)
    same = Call(f"gathered(...) of units {[*units]} of model {number}", (int(missing),))
    return p.then((call_of_all, same), (hold, number, units)), frees


def hold(p: Protocol, number: int, units: tuple[int, ...]) -> Next:
    """Hold units: each is gathered on all ranks if any is missing on any of them."""
    resident, collected = p.models[number].residency, list[Effect]()
    for unit in units if any(missing for (missing,) in p.heard) else ():
        if resident.has(unit):
            collected.append(TakePart(number, unit, exact=True))
            continue
        resident, starts = residency.start(resident, unit, inexact=False)
        resident, waits = residency.wait(resident, [unit])
        collected += [*starts, *waits]
    return p.holding(number, (residency.open_block(resident, units), tuple(collected)))


def unpin(p: Protocol, e: Unpin) -> Next:
    """A block ends, or a window: free what nothing else needs."""
    here = p.models[e.model].residency
    if e.units is None:
        return p.holding(e.model, residency.end_backward(replaced(here, stays=False)))
    return p.holding(e.model, residency.close_block(here, e.units))


def changed(p: Protocol, e: Changed) -> Next:
    """Free all gathered units: the parameters changed."""
    return p.holding(e.model, residency.release(p.models[e.model].residency, pinned=True))


# An error.


def raised(p: Protocol, _: Raised) -> Next:
    """Say that this rank raised. The others raise where they read it."""
    return say(p, Message(MessageKind.FAILED), (heard_raised,))


def heard_raised(p: Protocol, _: Round) -> Next:
    """All ranks have read that this one raised."""
    return all_know(p)


def say(p: Protocol, message: Message, task: Task) -> Next:
    """Post a message; the task goes on with the answer."""
    p = replaced(p, posted=message, known=False)
    return p.then(task), (Post(message), Read())


def serve(p: Protocol, said: Round, mine: frozenset[Asked] = frozenset()) -> Next:
    """Take part in every collective that a rank asks for, in one order."""
    collected: list[Effect] = []
    for one in said.asked:
        p, effects = _served(p, one, mine=one in mine)
        collected += effects
    return p, tuple(collected)


def _served(p: Protocol, one: Asked, *, mine: bool) -> Next:
    number, unit = one.model, one.unit
    if one.what is What.REDUCE:
        if number not in p.served:
            p = replaced(p, served=(*p.served, number))
        return p, (Reduce(number, unit, mine=mine),)
    model = p.models.get(number)
    if model is None:  # the performer says that it is gone
        return p, (TakePart(number, unit, exact=True),)
    here = model.residency
    # Outside of a pass nothing would end what is kept for one.
    keeps = model.units.limits.keeps and number in p.running
    inexact = one.what is What.GATHER and unit in model.units.rounds
    if keeps:
        here = residency.pin(here, [unit])
    if here.has(unit) or not (mine or keeps):
        return p.holding(number, (here, (TakePart(number, unit, exact=not inexact),)))
    here, starts = residency.start(here, unit, inexact=inexact)
    here, waits = residency.wait(here, [unit])
    return p.holding(number, (here, (*starts, *waits)))


def over(p: Protocol, said: Round) -> Next:
    """No rank is in a pass: what this rank has served of other passes is complete.

    A backward that ends here takes it itself. What brought nothing to any rank changes nothing.
    """
    takes = {n for n in p.running if p.models[n].course.in_backward}
    complete = Receive if said.has_brought else Discard
    received = (complete(model) for model in p.served if model not in takes)
    return replaced(p, served=()), (WaitForReductions(), *received)


# Errors.


def peers_failed(p: Protocol, said: Round) -> Next:
    """Raise, with all ranks that have read this round."""
    p, effects = all_know(replaced(p, agenda=(), open=None))
    return p, (*effects, Raise(tuple(said.failed)))


def differ(p: Protocol) -> Next:
    """The ranks make different calls: all of them raise."""
    p, effects = all_know(replaced(p, agenda=(), open=None, noted=NO_LOCAL_CALLS))
    return p, (*effects, Raise())


def all_know(p: Protocol) -> Next:
    """All ranks know of an error: what this one has served of the passes is discarded, as there."""
    dropped = (Discard(model) for model in p.served)
    return replaced(p, known=True, served=()), (WaitForReductions(), *dropped)
