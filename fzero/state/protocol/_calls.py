"""What all ranks do at one place: calls, collectives of the user's, blocks, an error."""

from __future__ import annotations

import zlib

from fzero.state import pass_state, replay, residency
from fzero.state._replaced import replaced
from fzero.state.effects import Effect, Exchange, TakePart
from fzero.state.protocol._plan import (
    close_plan,
    end_others,
    end_plan,
    go_on,
    learn,
    start_up_to,
    walk,
)
from fzero.state.protocol._rounds import all_know, differ, over, say, serve
from fzero.state.protocol.events import Call, Changed, Met, Noted, Pin, Raised, SyncPoint, Unpin
from fzero.state.protocol.records import LocalCalls, Next, Protocol, Task
from fzero.state.rounds import Message, MessageKind, Round

SYNC = "a collective of the user's (psum, all_gather, ...)"


def call(p: Protocol, e: Call) -> Next:
    """Make one round of a call, in which ranks that are in a pass are served."""
    if p.open is not None:
        return replaced(p, heard=()).then((learn, p.open)), ()
    text = f"{e.text}{p.noted.said}"
    return say(p, Message(MessageKind.CALL, text, int(e.has_plan), codes=e.values), (called,))


def noted(p: Protocol, e: Noted) -> Next:
    """Count a call that the next round compares; one in a loss changes no state of the step."""
    if p.inside:
        return p, ()
    digest, calls = zlib.crc32(e.text.encode(), p.noted.digest), p.noted.calls + 1
    said = f"\nlocal calls before: {calls}, the last {e.text} ({digest:08x})"
    return replaced(p, noted=LocalCalls(calls, digest, said)), ()


def called(p: Protocol, said: Round) -> Next:
    """All are heard if every rank makes this call."""
    if said.kinds <= {MessageKind.PASS, MessageKind.CALL}:
        everybody = MessageKind.PASS not in said.kinds
        if not said.is_same and (everybody or not said.is_served):
            return differ(p)
        if everybody:
            return replaced(p, heard=said.values, met=said.is_in_order), ()
    p = replaced(p, heard=())
    if said.is_over:
        p, effects = over(p)
        # Those that end their pass tell what they did, if any of them has asked.
        return p, (*effects, *(Exchange(None),) * said.has_asked)
    return serve(p, said)


def meet(p: Protocol, e: Call) -> Next:
    """Make a call until every rank makes it."""
    return p.then((call, e), (met, e)), ()


def met(p: Protocol, e: Call) -> Next:
    """Go on if all are heard."""
    return (p, ()) if p.heard else meet(p, e)


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
        return p.then(*((learn, number) for number in at), (arrive, at, e.values)), ()
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


def arrive(p: Protocol, at: tuple[int, ...], values: tuple[int, ...]) -> Next:
    """Arrive at the sync point of these models, and wait for the other ranks there."""
    away = list[Task]()
    for number in at:
        model = p.models[number]
        course = model.course.did_also(len(model.units.numels))
        away.append((depart, number, course.replay is not None))
        p = p.put(number, course=course, residency=replaced(model.residency, current=-1))
    ahead = [(walk, number) for number in at]
    ends = [(end_plan, number) for number in p.running if number not in at]
    return p.then(*ahead, *ends, (stand, at, values), *away), ()


def stand(p: Protocol, at: tuple[int, ...], values: tuple[int, ...]) -> Next:
    """Wait for the other ranks; say whether this one is at a sync point of a plan."""
    has_plan = any(p.models[number].course.replay is not None for number in at)
    return meet(p, Call(SYNC, values, has_plan=has_plan))


def depart(p: Protocol, number: int, had_plan: bool) -> Next:
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
    return p.then((end_others, e.model), (look_for, e.model, e.units)), ()


def look_for(p: Protocol, number: int, units: tuple[int, ...]) -> Next:
    """Free rounded values of the units; ask all ranks whether one is missing on any of them."""
    p, frees = p.holding(number, residency.drop_inexact(p.models[number].residency, units))
    missing = any(unit not in p.models[number].residency.gathered for unit in units)
    same = Call(f"gathered(...) of units {[*units]} of model {number}", (int(missing),))
    return p.then((meet, same), (hold, number, units)), frees


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
