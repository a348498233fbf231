"""Events of one model: its forward and backward, from their beginning to their end."""

from __future__ import annotations

import zlib
from typing import Any

from fzero.state import pass_state, residency
from fzero.state._replaced import replaced
from fzero.state.effects import Discard, Drop, Effect, Exchange, Post
from fzero.state.pass_state import FORWARD, PassState
from fzero.state.protocol import events as e
from fzero.state.protocol._calls import raised
from fzero.state.protocol._plan import ask, end_others, end_plan, learn
from fzero.state.protocol._rounds import over, say, serve
from fzero.state.protocol.records import Course, Model, Next, Protocol
from fzero.state.rounds import Message, MessageKind, Round, What
from fzero.state.schedule import joined


def join(p: Protocol, event: e.Join) -> Next:
    """Register a model."""
    here = residency.carried(event.model, event.units, event.gathered)
    return replaced(p, models={**p.models, event.model: Model(residency=here)}), ()


def leave(p: Protocol, event: e.Leave) -> Next:
    """Forget a model."""
    models = {number: model for number, model in p.models.items() if number != event.model}
    return replaced(p.without(event.model), models=models), ()


# Its beginning.


def begin(p: Protocol, event: e.Begin) -> Next:
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


def first_gradient(p: Protocol, event: e.FirstGradient) -> Next:
    """Announce a silent backward, which now has a gradient to reduce."""
    to = pass_state.first_gradient(p.models[event.model].phase)
    return _announced(p, event.model, to), ()


def _announced(p: Protocol, number: int, to: pass_state.Next) -> Protocol:
    p, is_announced = p.put(number, phase=to[0]), to[1]
    if is_announced and p.defers(number):
        return p.put(number, phase=pass_state.defer(to[0]))
    return p.then((end_others, number), (announce, number)) if is_announced else p


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


def end_forward(p: Protocol, event: e.EndForward) -> Next:
    """A forward is over that a backward may follow."""
    number, model = event.model, p.models[event.model]
    if model.phase.announced:
        return p.then((end_plan, number), (end_of_forward, number)), ()
    return _after_forward(p, number), ()


def end_of_forward(p: Protocol, number: int) -> Next:
    """Free what the forward gathered, unless it stays for the backward."""
    p = _after_forward(p, number)
    model = p.models[number]
    p = p.put(number, course=replaced(model.course, place=None)).without(number)
    return p.holding(number, residency.release(model.residency))


def _after_forward(p: Protocol, number: int) -> Protocol:
    model = p.models[number]
    return p.put(number, phase=pass_state.end_forward(model.phase), residency=_at_rest(model))


def _at_rest(model: Model) -> residency.Residency:
    """No unit is current, for its values may be rounded: a read outside of a pass is exact."""
    return replaced(model.residency, current=-1, rounds=False)


def finish(p: Protocol, event: e.Finish) -> Next:
    """A backward is over, or a forward that none follows."""
    number, model = event.model, p.models[event.model]
    if model.phase.deferred and not model.phase.announced:
        phase, _ = pass_state.first_gradient(model.phase)
        return p.put(number, phase=phase).then(
            (end_others, number), (announce, number), (finish, event)
        ), ()
    phase, is_ended = pass_state.finish(model.phase)
    course = replaced(model.course, left=event.left, learned={})
    if not is_ended:
        p = p.put(number, phase=phase, course=course, residency=_at_rest(model))
        return p.then((settle, number)), ()
    # Recorded here, for the rest of the plan may reduce them: else it would be forgotten next time.
    for unit in (unit for unit, complete in event.left if not complete):
        course = course.did_also(~unit)
    p = p.put(number, phase=phase, course=course)
    out = (come_to_end, number), (end_plan, number), (ask_left, number), (end_others, number)
    return p.then(*out, (say_done, number), (settle, number)), ()


def come_to_end(p: Protocol, number: int) -> Next:
    """Where ranks may not wait for reductions, wait for them in a round before the last ones.

    A rank that raised says so there: until then it starts none.
    """
    if not p.models[number].may_not_wait:
        return p, ()
    return p.then((learn, number), (say_end, number)), ()


def say_end(p: Protocol, number: int) -> Next:
    """Say that this rank has no more gradients, if all ranks follow one plan."""
    if p.models[number].course.replay is None:
        return p, ()
    return say(p, Message(MessageKind.DONE), (heard_end,))


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
    has_asked = p.models[number].course.asked
    return say(p, Message(MessageKind.DONE, hint=int(has_asked)), (heard_done, number))


def heard_done(p: Protocol, number: int, said: Round) -> Next:
    """Take part in what other ranks need, until no rank is in a pass."""
    if said.is_over:
        p, effects = over(p)
        return p.then((end_of_pass, number, said.has_asked)), effects
    p, effects = serve(p, said)
    return p.then((say_done, number)), effects


def end_of_pass(p: Protocol, number: int, asked: bool) -> Next:
    """All ranks have ended the pass: free what was kept for it; tell what it did if any `asked`."""
    model = p.models[number]
    here, frees = residency.end_backward(_at_rest(model))
    p = p.put(number, course=Course(), residency=here).without(number)
    if not asked:
        return p, frees
    return p.then((told, number)), (*frees, Exchange((number, dict(model.course.did))))


def told(p: Protocol, number: int, values: tuple[Any, ...]) -> Next:
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
    return p.holding(number, residency.wait(here, sorted(here.pinned))) if here.stays else (p, ())


# An error.


def failed(p: Protocol, event: e.Failed) -> Next:
    """The pass raised on this rank: end it in step with the others; tell them if they must know."""
    number, model = event.model, p.models[event.model]
    in_step, tells = pass_state.fail(model.phase, known=p.known, astray=event.astray)
    effects: tuple[Effect, ...] = (Drop(number), *(p.undone if in_step else ()))
    p = replaced(p.put(number, course=replaced(model.course, due=())), undone=())
    more = ((end_others, number), (raised, e.Raised())) if tells else ()
    end = ((end_plan, number),) if in_step else ()
    if tells and model.may_not_wait:  # the others wait in a round, or will come to one
        return p.then((learn, number), *more, *end), effects
    return p.then(*end, *more), effects


def give_up(p: Protocol, event: e.GiveUp) -> Next:
    """Forget the pass."""
    number, model = event.model, p.models[event.model]
    here, frees = residency.release(replaced(model.residency, rounds=False), pinned=True)
    p = p.put(number, phase=PassState(), course=Course(), residency=here).without(number)
    p = replaced(p, undone=(), open=None if p.open == number else p.open)
    return p, (Discard(number), *frees)
