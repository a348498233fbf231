"""The rounds of a rank: what it posts, and how it goes on with the answer of all ranks."""

from __future__ import annotations

import zlib
from typing import Any

from fzero.state import replay, residency
from fzero.state._replaced import replaced
from fzero.state.effects import (
    Discard,
    Effect,
    Exchange,
    Post,
    Raise,
    Read,
    Receive,
    Reduce,
    TakePart,
    WaitForReductions,
)
from fzero.state.protocol import _tasks as tasks
from fzero.state.protocol.events import Call, Raised
from fzero.state.protocol.records import Awaiting, Next, Protocol
from fzero.state.rounds import Asked, Message, MessageKind, Round, What, asking


def _say(p: Protocol, message: Message, task: Any) -> Next:
    """Post a message; the task goes on with the answer."""
    p = replaced(p, posted=message, known=False)
    return p.then(Awaiting(task)), (Post(message), Read())


# Announcements.


def announce(p: Protocol, t: tasks.Announce) -> Next:
    """Post the announcement of a phase; its answer is read when a collective depends on it."""
    model, course = p.models[t.model], p.models[t.model].course
    said = course.announcement
    assert said is not None
    did = {**course.did, said.place: ()}
    course = replaced(course, did=did, place=said.place)
    here = replaced(model.residency, current=-1)
    here, frees = residency.release(here, t.model)
    # What is here already is part of what ranks must have in common to follow one plan.
    facts = said.program and (said.program.digest, sorted(here.pinned))
    message = Message(
        MessageKind.PASS,
        f"{said.text}\nphase {said.place[1]}",
        hint=zlib.crc32(repr(facts).encode()),
        served=said.served,
    )
    p = p.put(t.model, replaced(model, course=course, residency=here)).without(t.model)
    p = replaced(p, running=(*p.running, t.model), open=t.model, posted=message, known=False)
    return p, (*frees, Post(message))


def learn(p: Protocol, t: tasks.Learn) -> Next:
    """Read what was announced, if it was not read."""
    return (p.then(Awaiting(t)), (Read(),)) if p.open == t.model else (p, ())


def learned(p: Protocol, t: tasks.Learn, said: Round) -> Next:
    """Follow the plan if all ranks announced the same, in the same order; else ask.

    All ranks then ask, also those of a rank that is done or makes a call, and so is not in this
    pass. What ranks ask for that are still in the pass before is served first.
    """
    if MessageKind.ASK in said.kinds:
        p, effects = serve(p, said)
        assert p.posted is not None
        again, more = _say(p, p.posted, t)
        return again, (*effects, *more)
    if not said.is_same and not said.is_served:
        return differ(p)
    p = replaced(p, open=None)
    model, course = p.models[t.model], p.models[t.model].course
    program = course.announcement and course.announcement.program
    if program is not None and said.is_same and said.is_in_order:
        return p.then(tasks.Pin(t.model), tasks.Follow(t.model, program)), ()
    p = p.put(t.model, replaced(model, course=replaced(course, asked=True)))
    here = model.residency
    missing = tuple(u for u in model.units.persistent if u not in here.gathered)
    asks = [tasks.Ask(t.model, model.gather, missing)] if missing else []
    return p.then(*asks, tasks.Pin(t.model)), ()


def follow(p: Protocol, t: tasks.Follow) -> Next:
    """Begin the plan of a program; pinned units need no gather in it."""
    model, units = p.models[t.model], p.models[t.model].units
    place = replay.begin(t.program, units.numels, model.residency.pinned, units.limits)
    return p.put(t.model, replaced(model, course=replaced(model.course, replay=place))), ()


# Asking.


def ask(p: Protocol, t: tasks.Ask) -> Next:
    """Ask, after the plans of other models have come to their ends."""
    return p.then(tasks.EndOthers(t.model), tasks.AskNow(t.model, t.what, t.units)), ()


def ask_now(p: Protocol, t: tasks.AskNow) -> Next:
    """Ask for as many collectives as one message has room for."""
    return _say(p, asking(t.model, t.what, t.units), t)


def asked(p: Protocol, t: tasks.AskNow, said: Round) -> Next:
    """Take part in what any rank asked for in this round; ask for what is left."""
    p, effects = serve(p, said, frozenset(Asked(t.model, t.what, unit) for unit in t.units))
    rest = tuple(unit for unit in t.units if Asked(t.model, t.what, unit) not in said.asked)
    return p.then(*[tasks.AskNow(t.model, t.what, rest)] * bool(rest)), effects


def ask_left(p: Protocol, t: tasks.AskLeft) -> Next:
    """At the end of a backward, ask for the reductions that no plan has started."""
    model, course = p.models[t.model], p.models[t.model].course
    if not course.left:
        return p, ()
    units = tuple(unit for unit, _ in course.left)
    course = replaced(course, asked=True)
    p = p.put(t.model, replaced(model, course=course))
    return p.then(tasks.Ask(t.model, What.REDUCE, units)), ()


def serve(p: Protocol, said: Round, mine: frozenset[Asked] = frozenset()) -> Next:
    """Take part in every collective that a rank asks for, in one order."""
    collected: list[Effect] = []
    for one in said.asked:
        p, effects = _served(p, one, mine=one in mine)
        collected += effects
    return p, tuple(collected)


def _served(p: Protocol, one: Asked, *, mine: bool) -> Next:
    if one.what is What.REDUCE:
        if one.model not in (*p.running, *p.served):
            p = replaced(p, served=(*p.served, one.model))
        return p, (Reduce(one.model, one.unit, mine=mine),)
    model = p.models.get(one.model)
    if model is None:  # the performer says that it is gone
        return p, (TakePart(one.model, one.unit, exact=True),)
    here = model.residency
    # Outside of a pass nothing would end what is kept for one.
    keeps = model.units.limits.keeps and one.model in p.running
    inexact = one.what is What.GATHER and one.unit in model.units.rounds
    if keeps:
        here = residency.pin(here, [one.unit])
    if here.has(one.unit) or not (mine or keeps):
        effects: tuple[Effect, ...] = (TakePart(one.model, one.unit, exact=not inexact),)
    else:
        here, starts = residency.start(here, one.model, one.unit, inexact=inexact)
        here, waits = residency.wait(here, one.model, [one.unit])
        effects = (*starts, *waits)
    return p.put(one.model, replaced(model, residency=here)), effects


# The end of a pass.


def say_done(p: Protocol, t: tasks.SayDone) -> Next:
    """Say that this rank is done."""
    has_asked = p.models[t.model].course.asked
    return _say(p, Message(MessageKind.DONE, hint=int(has_asked)), t)


def heard_done(p: Protocol, t: tasks.SayDone, said: Round) -> Next:
    """Take part in what other ranks need, until no rank is in a pass."""
    if said.is_over:
        p, effects = _over(p)
        return p.then(tasks.EndOfPass(t.model, asked=said.has_asked)), effects
    p, effects = serve(p, said)
    return p.then(t), effects


def _over(p: Protocol) -> Next:
    """No rank is in a pass: what this rank has served of other passes is complete."""
    received = (Receive(model) for model in p.served)
    return replaced(p, served=()), (WaitForReductions(), *received)


# Calls.


def call(p: Protocol, e: Call) -> Next:
    """Make a call together with every rank; ranks that are in a pass are served until they come."""
    if p.open is not None:
        return p.then(tasks.Learn(p.open), e), ()
    return _say(p, Message(MessageKind.CALL, e.text, int(e.has_plan), codes=e.values), e)


def called(p: Protocol, e: Call, said: Round) -> Next:
    """Go on if every rank makes this call."""
    if said.kinds <= {MessageKind.PASS, MessageKind.CALL}:
        everybody = said.kinds == {MessageKind.CALL}
        if not said.is_same and (everybody or not said.is_served):
            return differ(p)
        if everybody:
            return replaced(p, heard=said.values, met=said.is_in_order), ()
    if said.is_over:
        p, effects = _over(p)
        # Those that end their pass tell what they did, if any of them has asked.
        return p.then(e), (*effects, *(Exchange(None),) * said.has_asked)
    p, effects = serve(p, said)
    return p.then(e), effects


# Errors.


def raised(p: Protocol, e: Raised) -> Next:
    """Say that this rank raised. The others raise where they read it."""
    return _say(p, Message(MessageKind.FAILED), e)


def heard_raised(p: Protocol, e: Raised, said: Round) -> Next:
    """All ranks have read that this one raised."""
    return _failed(p)


def peers_failed(p: Protocol, said: Round) -> Next:
    """Raise, with all ranks that have read this round."""
    p, effects = _failed(replaced(p, agenda=(), open=None))
    return p, (*effects, Raise(tuple(said.failed)))


def differ(p: Protocol) -> Next:
    """The ranks make different calls: all of them raise."""
    p, effects = _failed(replaced(p, agenda=(), open=None))
    return p, (*effects, Raise())


def _failed(p: Protocol) -> Next:
    """All ranks know of an error: what this one has served of the passes is discarded, as there."""
    dropped = (Discard(model) for model in p.served)
    return replaced(p, known=True, served=()), (WaitForReductions(), *dropped)
