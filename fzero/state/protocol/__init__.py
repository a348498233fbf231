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

from fzero.state._replaced import replaced
from fzero.state.effects import Effect, Exchange, Free, Gather, Post, Reduce, TakePart, Wait
from fzero.state.protocol import _pass, _plan, _rounds
from fzero.state.protocol import _tasks as tasks
from fzero.state.protocol._plan import SYNC as SYNC
from fzero.state.protocol.events import Adopt as Adopt
from fzero.state.protocol.events import Announcement as Announcement
from fzero.state.protocol.events import Answer as Answer
from fzero.state.protocol.events import Begin as Begin
from fzero.state.protocol.events import Broke as Broke
from fzero.state.protocol.events import Call as Call
from fzero.state.protocol.events import Changed as Changed
from fzero.state.protocol.events import EndForward as EndForward
from fzero.state.protocol.events import Enter as Enter
from fzero.state.protocol.events import Event as Event
from fzero.state.protocol.events import Failed as Failed
from fzero.state.protocol.events import Finish as Finish
from fzero.state.protocol.events import FinishForward as FinishForward
from fzero.state.protocol.events import FirstGradient as FirstGradient
from fzero.state.protocol.events import GiveUp as GiveUp
from fzero.state.protocol.events import Hold as Hold
from fzero.state.protocol.events import Join as Join
from fzero.state.protocol.events import Leave as Leave
from fzero.state.protocol.events import LetGo as LetGo
from fzero.state.protocol.events import Raised as Raised
from fzero.state.protocol.events import Ready as Ready
from fzero.state.protocol.events import Settle as Settle
from fzero.state.protocol.events import SyncPoint as SyncPoint
from fzero.state.protocol.events import Told as Told
from fzero.state.protocol.events import Use as Use
from fzero.state.protocol.events import WindowEnded as WindowEnded
from fzero.state.protocol.records import Awaiting, Next
from fzero.state.protocol.records import Course as Course
from fzero.state.protocol.records import Model as Model
from fzero.state.protocol.records import Protocol as Protocol
from fzero.state.residency import Residency as Residency
from fzero.state.residency import Units as Units


def advance(protocol: Protocol, event: Event) -> tuple[Protocol, tuple[Effect, ...]]:
    """Return the record after an event, and the effects to perform, in this order.

    If the last effect is `Read` or `Exchange`, the event goes on with its answer: `advance` it with
    that before any other event. Else it is over.

    Example:
        >>> from fzero.state.rounds import MessageKind, Round
        >>> from fzero.state.schedule import Program
        >>> protocol, _ = advance(Protocol(), Join(1, Units(numels=(4, 4))))
        >>> said = Announcement(text="forward", place=(0, 0), program=Program((0, 1)))
        >>> begun, effects = advance(protocol, Begin(1, announcement=said, sums=True))
        >>> [type(effect).__name__ for effect in effects]
        ['Post']
        >>> asked, effects = advance(begun, Use(1, 0))
        >>> effects
        (Read(),)
        >>> alone = Round([[MessageKind.PASS, 0, 0, 0]])
        >>> there, effects = advance(asked, Answer(alone))
        >>> [(type(effect).__name__, effect.unit) for effect in effects]
        [('Gather', 0), ('Gather', 1), ('Wait', 0)]
    """
    if isinstance(event, Broke):
        return _broke(protocol, event), ()
    collected: list[Effect] = []
    if protocol.undone and not isinstance(event, Failed | GiveUp):
        collected += protocol.undone  # the other ranks have started these collectives
        protocol = replaced(protocol, undone=())
    if isinstance(event, Told) and not _expects_values(protocol):
        return protocol, ()  # of an exchange in which this rank takes part only
    if isinstance(event, Answer | Told):
        waiting, *rest = protocol.agenda
        protocol, effects = _resume(replaced(protocol, agenda=tuple(rest)), waiting.task, event)
    else:
        protocol, effects = _STEPS[type(event)](protocol, event)
    collected += effects
    while protocol.agenda and not isinstance(protocol.agenda[0], Awaiting):
        task = protocol.agenda[0]
        step = _STEPS[type(task)]
        protocol, effects = step(replaced(protocol, agenda=protocol.agenda[1:]), task)
        collected += effects
    return protocol, tuple(collected)


def _expects_values(protocol: Protocol) -> bool:
    waiting = protocol.agenda[0] if protocol.agenda else None
    return isinstance(waiting, Awaiting) and isinstance(waiting.task, tasks.EndOfPass)


def _resume(protocol: Protocol, task: Any, event: Answer | Told) -> Next:
    if isinstance(event, Told):
        return _pass.told(protocol, task, event)
    if event.round.failed and not isinstance(task, Raised):
        return _rounds.peers_failed(protocol, event.round)
    return _ANSWERED[type(task)](protocol, task, event.round)


def _broke(protocol: Protocol, event: Broke) -> Protocol:
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
    return replaced(protocol, agenda=(), undone=tuple(undone), open=still_open)


_STEPS: dict[type, Callable[[Protocol, Any], Next]] = {
    Join: _pass.join,
    Leave: _pass.leave,
    Begin: _pass.begin,
    FirstGradient: _pass.first_gradient,
    Use: _plan.use,
    Ready: _plan.ready,
    SyncPoint: _plan.sync_point,
    EndForward: _pass.end_forward,
    FinishForward: _pass.finish_forward,
    Finish: _pass.finish,
    Failed: _pass.failed,
    GiveUp: _pass.give_up,
    Raised: _rounds.raised,
    Call: _rounds.call,
    Enter: _pass.enter,
    Hold: _pass.hold,
    LetGo: _pass.let_go,
    Adopt: _pass.adopt,
    Settle: _pass.settle,
    Changed: _pass.changed,
    WindowEnded: _pass.window_ended,
    tasks.Announce: _rounds.announce,
    tasks.Learn: _rounds.learn,
    tasks.Pin: _pass.pin,
    tasks.Follow: _rounds.follow,
    tasks.EndPlan: _plan.end_plan,
    tasks.EndOthers: _plan.end_others,
    tasks.Walk: _plan.walk,
    tasks.ClosePlan: _plan.close_plan,
    tasks.ReduceDue: _plan.reduce_due,
    tasks.Reach: _plan.reach,
    tasks.Obtain: _plan.obtain,
    tasks.Ask: _rounds.ask,
    tasks.AskNow: _rounds.ask_now,
    tasks.AskLeft: _rounds.ask_left,
    tasks.Arrive: _plan.arrive,
    tasks.Meet: _plan.meet,
    tasks.Depart: _plan.depart,
    tasks.EndOfForward: _pass.end_of_forward,
    tasks.SayDone: _rounds.say_done,
    tasks.EndOfPass: _pass.end_of_pass,
    tasks.DropInexact: _pass.drop_inexact,
}
"""What each event and each task does first."""

_ANSWERED: dict[type, Callable[[Protocol, Any, Any], Next]] = {
    tasks.Learn: _rounds.learned,
    tasks.AskNow: _rounds.asked,
    tasks.SayDone: _rounds.heard_done,
    Call: _rounds.called,
    Raised: _rounds.heard_raised,
}
"""How those go on that read a round."""
