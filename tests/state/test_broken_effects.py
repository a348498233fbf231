"""An effect raised: what stood behind it is done first by the next event, or in step by `Failed`.

All ranks must start the same collectives, also where one of them raised while it did what an event
asked for.
"""

from __future__ import annotations

import pytest

from fzero.state.effects import Discard, Drop, Effect, Free, Gather, Post, Wait
from fzero.state.protocol import (
    Announcement,
    Answer,
    Begin,
    Broke,
    Failed,
    GiveUp,
    Join,
    Protocol,
    Units,
    Use,
    advance,
)
from fzero.state.rounds import Message, MessageKind, Round
from fzero.state.schedule import Program

ALONE = Round([[MessageKind.PASS, 0, 0, 0]])


def broken(*undone: Effect) -> Protocol:
    """A rank that reads unit 0 of a plan in a forward, and could not do some effects of it."""
    said = Announcement(text="forward", place=(0, 0), program=Program((0, 1, 2)))
    protocol, _ = advance(Protocol(), Join(1, Units(numels=(4, 4, 4))))
    protocol, _ = advance(protocol, Begin(1, said, sums=True))
    protocol, _ = advance(protocol, Use(1, 0))
    protocol, effects = advance(protocol, Answer(ALONE))
    assert effects == (Gather(1, 0, exact=True), Gather(1, 1, exact=True), Wait(1, 0))
    protocol, nothing = advance(protocol, Broke(undone))
    assert nothing == () and not protocol.agenda
    return protocol


LEFT = Gather(1, 1, exact=True), Wait(1, 0)


def test_the_next_event_does_it_first_and_once() -> None:
    protocol, effects = advance(broken(*LEFT), Use(1, 1))
    assert effects[:2] == LEFT
    # then what this event asks for
    assert effects[2:] == (Free(1, 0), Gather(1, 2, exact=True), Wait(1, 1))
    assert advance(protocol, Use(1, 2))[1] == (Free(1, 1), Wait(1, 2))


def test_a_pass_that_fails_in_step_does_it_before_the_rest_of_the_plan() -> None:
    _, effects = advance(broken(*LEFT), Failed(1, astray=False))
    assert effects[:3] == (Drop(1), *LEFT)
    assert Gather(1, 2, exact=True) in effects[3:]


def test_where_the_communication_failed_nothing_is_started_any_more() -> None:
    protocol, effects = advance(broken(*LEFT), Failed(1, astray=True))
    assert effects == (Drop(1),)
    protocol, effects = advance(protocol, GiveUp(1))
    assert effects == (Discard(1), Free(1, 0), Free(1, 1))
    assert protocol.undone == ()


@pytest.mark.parametrize("posted", [False, True])
def test_an_announcement_that_was_not_posted_is_not_read(posted: bool) -> None:
    said = Announcement(text="forward", place=(0, 0))
    protocol, _ = advance(Protocol(), Join(1, Units(numels=(4,))))
    protocol, _ = advance(protocol, Begin(1, said, sums=True))
    undone = () if posted else (Post(Message(MessageKind.PASS)),)
    protocol, _ = advance(protocol, Broke(undone))
    assert protocol.open == (1 if posted else None)
