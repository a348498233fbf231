"""Events of one model: its forward and backward, from their beginning to their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fzero.state import pass_state, residency
from fzero.state._replaced import replaced
from fzero.state.effects import (
    AnnouncePhase,
    Discard,
    Drop,
    EndPhase,
    Exchange,
    PassEffect,
    TakePart,
)
from fzero.state.pass_state import FORWARD, PassState
from fzero.state.protocol import _tasks as tasks
from fzero.state.protocol import events as e
from fzero.state.protocol._plan import started
from fzero.state.protocol.records import Awaiting, Course, Model, Next, Protocol
from fzero.state.schedule import Phases, joined


def join(p: Protocol, event: e.Join) -> Next:
    """Register a model."""
    return p.put(event.model, Model(units=event.units)), ()


def leave(p: Protocol, event: e.Leave) -> Next:
    """Forget a model."""
    models = {number: model for number, model in p.models.items() if number != event.model}
    return replaced(p.without(event.model), models=models), ()


def begin(p: Protocol, event: e.Begin) -> Next:
    """Begin a forward or backward; announce it if it gathers or reduces anything."""
    model, resident = p.models[event.model], p.models[event.model].residency
    frees = ()
    if not event.rounds:  # a window may have brought rounded values
        resident, frees = residency.drop_inexact(resident, event.model, resident.gathered)
    reads = model.units.gathers and len(resident.pinned) < len(model.units.numels)
    if event.announcement.place[1] == FORWARD:
        p = replaced(p, known=False)  # an error of the pass before does not concern this one
        to = pass_state.begin_forward(model.phase, reads=reads, sums=event.sums)
    else:
        to = pass_state.begin_backward(
            model.phase,
            reads=reads,
            sums=event.sums,
            silent=event.silent,
            dropped=event.dropped,
        )
    course = replaced(model.course, announcement=event.announcement)
    resident = replaced(resident, stays=event.stays)
    model = replaced(model, phase=to[0], course=course, residency=resident, rounds=event.rounds)
    p, _ = _crossing(p.put(event.model, model), event.model, to[1])
    return p, frees


def first_gradient(p: Protocol, event: e.FirstGradient) -> Next:
    """Announce a silent backward, which now has a gradient to reduce."""
    model = p.models[event.model]
    phase, effects = pass_state.first_gradient(model.phase)
    return _crossing(p.put(event.model, replaced(model, phase=phase)), event.model, effects)


def end_forward(p: Protocol, event: e.EndForward) -> Next:
    """A forward is over that a backward may follow."""
    model = p.models[event.model]
    if model.phase.gathered:
        return p.then(tasks.EndPlan(event.model), tasks.EndOfForward(event.model)), ()
    return p.put(event.model, _after_forward(model)), ()


def end_of_forward(p: Protocol, t: tasks.EndOfForward) -> Next:
    """Free what the forward gathered, unless it stays for the backward."""
    model = _after_forward(p.models[t.model])
    resident, frees = residency.release(model.residency, t.model)
    course = replaced(model.course, place=None)
    model = replaced(model, residency=resident, course=course)
    return p.put(t.model, model).without(t.model), frees


def _after_forward(model: Model) -> Model:
    resident = replaced(model.residency, current=-1)  # its values may be rounded
    phase = pass_state.end_forward(model.phase)
    return replaced(model, phase=phase, residency=resident, rounds=False)


def finish_forward(p: Protocol, event: e.FinishForward) -> Next:
    """A forward is over that no backward follows."""
    model = p.models[event.model]
    phase, effects = pass_state.finish_forward(model.phase)
    return _ending(p.put(event.model, replaced(model, phase=phase)), event.model, effects, ())


def finish(p: Protocol, event: e.Finish) -> Next:
    """A backward is over."""
    model = p.models[event.model]
    phase, effects = pass_state.finish(model.phase)
    model = replaced(model, phase=phase)
    return _ending(p.put(event.model, model), event.model, effects, event.left)


def _crossing(p: Protocol, number: int, effects: tuple[PassEffect, ...]) -> Next:
    if AnnouncePhase in map(type, effects):
        return p.then(tasks.EndOthers(number), tasks.Announce(number)), ()
    return p, ()


def _ending(
    p: Protocol, number: int, effects: tuple[PassEffect, ...], left: tuple[tuple[int, bool], ...]
) -> Next:
    model = p.models[number]
    course = replaced(model.course, left=left, learned={})
    if EndPhase not in map(type, effects):
        resident = replaced(model.residency, current=-1)
        model = replaced(model, course=course, residency=resident, rounds=False)
        return p.put(number, model), ()
    # Recorded here, for the rest of the plan may reduce them: else it would be forgotten next time.
    for unit in (unit for unit, complete in left if not complete):
        course = course.did_also(~unit)
    p = p.put(number, replaced(model, course=course))
    out = tasks.EndPlan(number), tasks.AskLeft(number), tasks.EndOthers(number)
    return p.then(*out, tasks.SayDone(number)), ()


def end_of_pass(p: Protocol, t: tasks.EndOfPass) -> Next:
    """All ranks have ended the pass: free the units that were kept for it."""
    model, did = p.models[t.model], p.models[t.model].course.did
    resident = replaced(model.residency, current=-1)
    resident, frees = residency.end_backward(resident, t.model, model.units.persistent)
    model = replaced(model, course=Course(), residency=resident, rounds=False)
    p = p.put(t.model, model).without(t.model)
    if not t.asked:
        return p, frees
    return p.then(Awaiting(t)), (*frees, Exchange((t.model, dict(did))))


def told(p: Protocol, t: tasks.EndOfPass, event: e.Told) -> Next:
    """Learn the programs of all ranks in this pass: the schedule expects them from now on."""
    model = p.models[t.model]
    mine = _phases_of(t.model, event.values)
    learned = joined(mine, len(model.units.numels))
    return p.put(t.model, replaced(model, course=replaced(model.course, learned=learned))), ()


def _phases_of(number: int, values: tuple[Any, ...]) -> list[Phases]:
    """The program of each rank in a model's pass; None of a rank that was in no pass."""
    programs: list[Mapping[Any, Any]] = [did for one, did in filter(None, values) if one == number]
    return programs


def failed(p: Protocol, event: e.Failed) -> Next:
    """The pass raised on this rank: end it in step with the others; tell them if they must know."""
    model = p.models[event.model]
    _, in_step, tells = pass_state.fail(model.phase, known=p.known, astray=event.astray)
    course = replaced(model.course, due=())
    undone = p.undone if in_step else ()
    p = replaced(p.put(event.model, replaced(model, course=course)), undone=())
    steps = [tasks.EndPlan(event.model)] if in_step else []
    more = [tasks.EndOthers(event.model), e.Raised()] if tells else []
    return p.then(*steps, *more), (Drop(event.model), *undone)


def give_up(p: Protocol, event: e.GiveUp) -> Next:
    """Forget the pass."""
    model = p.models[event.model]
    resident, frees = residency.release(model.residency, event.model, pinned=True)
    model = Model(units=model.units, phase=PassState(), course=Course(), residency=resident)
    p = replaced(p.put(event.model, model).without(event.model), undone=())
    p = replaced(p, open=None) if p.open == event.model else p
    return p, (Discard(event.model), *frees)


# Between passes.


def enter(p: Protocol, event: e.Enter) -> Next:
    """A block wants exact values."""
    wanted = tasks.DropInexact(event.model, event.units)
    return p.then(tasks.EndOthers(event.model), wanted), ()


def drop_inexact(p: Protocol, t: tasks.DropInexact) -> Next:
    """Free those of these units whose gathered values are rounded."""
    model = p.models[t.model]
    resident, frees = residency.drop_inexact(model.residency, t.model, t.units)
    return p.put(t.model, replaced(model, residency=resident)), frees


def hold(p: Protocol, event: e.Hold) -> Next:
    """A block holds units: each is gathered on all ranks if any is missing on any of them."""
    model, resident = p.models[event.model], p.models[event.model].residency
    collected: list[Any] = []
    for unit in event.units if event.missing else ():
        if resident.has(unit):
            collected.append(TakePart(event.model, unit, exact=True))
            continue
        resident, starts = residency.start(resident, event.model, unit, inexact=False)
        resident, waits = residency.wait(resident, event.model, [unit])
        collected += [*starts, *waits]
    resident = residency.open_block(resident, event.units)
    return p.put(event.model, replaced(model, residency=resident)), tuple(collected)


def let_go(p: Protocol, event: e.LetGo) -> Next:
    """A block ends."""
    model = p.models[event.model]
    resident, frees = residency.close_block(model.residency, event.model, event.units)
    return p.put(event.model, replaced(model, residency=resident)), frees


def adopt(p: Protocol, event: e.Adopt) -> Next:
    """Units come with a window."""
    model = p.models[event.model]
    inexact = model.units.rounds.intersection(event.units)
    resident = residency.adopt(model.residency, event.units, inexact=inexact)
    return p.put(event.model, replaced(model, residency=resident)), ()


def settle(p: Protocol, event: e.Settle) -> Next:
    """Wait for all that is pinned."""
    model = p.models[event.model]
    resident, waits = residency.wait(model.residency, event.model, sorted(model.residency.pinned))
    return p.put(event.model, replaced(model, residency=resident)), waits


def changed(p: Protocol, event: e.Changed) -> Next:
    """Free all gathered units: the parameters changed."""
    model = p.models[event.model]
    resident, frees = residency.release(model.residency, event.model, pinned=True)
    return p.put(event.model, replaced(model, residency=resident)), frees


def window_ended(p: Protocol, event: e.WindowEnded) -> Next:
    """Unpin the units that a window kept; free those that nothing else needs."""
    model = p.models[event.model]
    resident = replaced(model.residency, stays=False)
    resident, frees = residency.end_backward(resident, event.model, model.units.persistent)
    return p.put(event.model, replaced(model, residency=resident)), frees


def pin(p: Protocol, t: tasks.Pin) -> Next:
    """Gather the missing persistent units, and pin all of them."""
    model, resident = p.models[t.model], p.models[t.model].residency
    units, collected = model.units.persistent, []
    for unit in units:
        resident, more = started(model, resident, t.model, unit)
        collected += more
    resident, waits = residency.wait(residency.pin(resident, units), t.model, units)
    resident = replaced(resident, seen=resident.seen.union(units))
    return p.put(t.model, replaced(model, residency=resident)), (*collected, *waits)
