"""The rounds of a rank: what it posts, what it does for others, and how an error ends them."""

from __future__ import annotations

from fzero.state import residency
from fzero.state._replaced import replaced
from fzero.state.effects import (
    Discard,
    Effect,
    Post,
    Raise,
    Read,
    Receive,
    Reduce,
    TakePart,
    WaitForReductions,
)
from fzero.state.protocol.records import NO_LOCAL_CALLS, Next, Protocol, Task
from fzero.state.rounds import Asked, Message, Round, What


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


def over(p: Protocol) -> Next:
    """No rank is in a pass: what this rank has served of other passes is complete.

    A backward that ends here takes it itself.
    """
    takes = {n for n in p.running if p.models[n].course.in_backward}
    received = (Receive(model) for model in p.served if model not in takes)
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
