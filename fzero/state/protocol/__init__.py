"""The protocol of a rank: one record and one transition, which decide when every collective starts.

What comes in: events of a driver (`Begin`, `Use`, `Ready`, ...) and what the other ranks said
(`Answer`). What goes out: the next record, and effects in the order in which they are done. A
record has host integers, texts and tuples only; nothing here communicates, waits or holds a tensor.

All ranks that announce the same program run its collectives in its order, whatever they use
themselves (see `state.replay`). A rank that needs what the rest of the plan does not have runs the
plan to its end, and asks there: every rank takes part in what any rank asks for. At stage 3 a
program is recorded: what the ranks did before. Below stage 3 it is known: every bucket is reduced
once, the last one first. One plan runs at a time on the same ranks: where a pass of another model
begins in the middle of a pass, or asks, the plan of this one is run to its end first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fzero.state.effects import (
    Effect,
    Exchange,
    Free,
    Gather,
    Look,
    Post,
    Read,
    Reduce,
    TakePart,
    Wait,
    replaced,
)
from fzero.state.protocol import transitions as to
from fzero.state.protocol.events import Announcement as Announcement
from fzero.state.protocol.events import Answer as Answer
from fzero.state.protocol.events import Begin as Begin
from fzero.state.protocol.events import Broke as Broke
from fzero.state.protocol.events import Call as Call
from fzero.state.protocol.events import Changed as Changed
from fzero.state.protocol.events import EndForward as EndForward
from fzero.state.protocol.events import Failed as Failed
from fzero.state.protocol.events import Finish as Finish
from fzero.state.protocol.events import FirstGradient as FirstGradient
from fzero.state.protocol.events import GiveUp as GiveUp
from fzero.state.protocol.events import Join as Join
from fzero.state.protocol.events import Leave as Leave
from fzero.state.protocol.events import Met as Met
from fzero.state.protocol.events import Noted as Noted
from fzero.state.protocol.events import Pin as Pin
from fzero.state.protocol.events import ProtocolEvent as ProtocolEvent
from fzero.state.protocol.events import Raised as Raised
from fzero.state.protocol.events import Ready as Ready
from fzero.state.protocol.events import SyncPoint as SyncPoint
from fzero.state.protocol.events import Unpin as Unpin
from fzero.state.protocol.events import Use as Use
from fzero.state.protocol.records import Course as Course
from fzero.state.protocol.records import Model as Model
from fzero.state.protocol.records import Next
from fzero.state.protocol.records import Protocol as Protocol
from fzero.state.protocol.transitions import SYNC as SYNC
from fzero.state.protocol.transitions import peers_failed
from fzero.state.residency import Residency as Residency
from fzero.state.residency import Units as Units
from fzero.state.rounds import Round


def advance(protocol: Protocol, event: ProtocolEvent) -> tuple[Protocol, tuple[Effect, ...]]:
    """Return the record after an event, and the effects to perform, in this order.

    If the last effect brings an `Answer`, the event goes on with it: `advance` the record with that
    before any other event. Else it is over.

    Example:
        >>> from fzero.state.rounds import MessageKind
        >>> from fzero.state.schedule import Program
        >>> protocol, _ = advance(Protocol(), Join(1, Units(numels=(4, 4))))
        >>> said = Announcement(text="forward", place=(0, 0), program=Program((0, 1)))
        >>> begun, effects = advance(protocol, Begin(1, announcement=said, sums=True))
        >>> [type(effect).__name__ for effect in effects]
        ['Post']
        >>> asked, effects = advance(begun, Use(1, 0))
        >>> [type(effect).__name__ for effect in effects]
        ['Read']
        >>> alone = Round([[MessageKind.PASS, 0, 0, 0]])
        >>> there, effects = advance(asked, Answer(alone))
        >>> [(type(effect).__name__, effect.unit) for effect in effects]
        [('Gather', 0), ('Gather', 1), ('Wait', 0)]
    """
    collected: list[Effect] = []
    if protocol.undone and not isinstance(event, Failed | GiveUp | Broke):
        collected += protocol.undone  # the other ranks have started these collectives
        protocol = replaced(protocol, undone=())
    protocol, effects = _STEPS[type(event)](protocol, event)
    collected += effects
    while protocol.agenda and not (effects and _brings_answer(effects[-1])):
        (step, *args), *rest = protocol.agenda
        protocol, effects = step(replaced(protocol, agenda=tuple(rest)), *args)
        collected += effects
    return protocol, tuple(collected)


def _brings_answer(effect: Effect) -> bool:
    """Whether an effect brings an answer, with which the next task goes on."""
    return isinstance(effect, Read | Look) or (
        isinstance(effect, Exchange) and effect.value is not None
    )


def _answered(protocol: Protocol, event: Answer) -> Next:
    """The task that waits goes on with what was said; an error of other ranks ends the event."""
    task, *rest = protocol.agenda
    said = event.said
    if isinstance(said, Round) and said.failed and task[0] is not to.heard_raised:
        return peers_failed(protocol, said)
    return replaced(protocol, agenda=((*task, said), *rest)), ()


def _broke(protocol: Protocol, event: Broke) -> Next:
    """An effect raised: give up the rest of its event, except what other ranks wait for."""
    kept = Gather | TakePart | Wait | Free | Reduce
    undone: list[Effect] = []
    for effect in event.undone:
        if isinstance(effect, kept):
            undone.append(effect)
        elif isinstance(effect, Exchange):  # the others have nothing of this pass from here
            undone.append(Exchange(None))
    unposted = any(isinstance(x, Post) for x in event.undone)
    still_open = None if unposted else protocol.open
    return replaced(protocol, agenda=(), undone=tuple(undone), open=still_open), ()


_STEPS: dict[type, Callable[[Protocol, Any], Next]] = {
    Join: to.join,
    Leave: to.leave,
    Begin: to.begin,
    FirstGradient: to.first_gradient,
    Use: to.use,
    Ready: to.ready,
    SyncPoint: to.sync_point,
    Met: to.met_all,
    EndForward: to.end_forward,
    Finish: to.finish,
    Failed: to.failed,
    GiveUp: to.give_up,
    Raised: to.raised,
    Call: to.call,
    Noted: to.noted,
    Pin: to.pin,
    Unpin: to.unpin,
    Changed: to.changed,
    Answer: _answered,
    Broke: _broke,
}
"""What each event does first."""
