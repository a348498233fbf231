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

The events come first, then the record, and then `advance`, with what each event does: a pass from
its beginning to its end, its plan, calls, rounds, errors. The functions of events (`begin`, `use`,
`ready`, `finish`, ...) come first in their part; what they leave to do stands below them. Where a
plan must be read or ended first, an event is left to do once more behind that. `p` is the record,
`number` that of a model, the same on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fzero.state import replay, residency
from fzero.state.effects import (
    Discard,
    Drop,
    Effect,
    Exchange,
    Free,
    Gather,
    Look,
    Post,
    Raise,
    Read,
    Receive,
    Reduce,
    TakePart,
    Wait,
    WaitForReductions,
    replaced,
)
from fzero.state.replay import Replay
from fzero.state.residency import Residency
from fzero.state.residency import Units as Units
from fzero.state.rounds import (
    ASKED,
    BROUGHT,
    MANY,
    Asked,
    Message,
    MessageKind,
    Round,
    Served,
    What,
    asking,
)
from fzero.state.schedule import FORWARD, Events, Place, Program, joined

# The events: what the driver of a rank does, and what the other ranks answered.


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a rank announces of a phase.

    Attributes:
        text: what must be equal on all ranks for their phases to go together.
        place: which pass since the update, and which phase of it.
        program: what the phase is expected to do; None if nothing was recorded.
        served: who takes part in it meanwhile.
    """

    text: str
    place: Place
    program: Program | None = None
    served: int = Served.NOBODY


class ProtocolEvent:
    """What the driver of a rank, or its performer, tells the protocol."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Join(ProtocolEvent):
    """Register a model; forget an earlier one of the same number.

    gathered: units that a window has gathered, and brings.
    """

    model: int
    units: Units
    gathered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave(ProtocolEvent):
    """No pass of the model will follow."""

    model: int


@dataclass(frozen=True, slots=True)
class Begin(ProtocolEvent):
    """A forward or a backward begins.

    Attributes:
        announcement: told to the others if anything of the phase crosses ranks.
        sums: gradients are reduced, in this phase or in the backward that may follow.
        stays: what is gathered stays until the window ends.
        rounds: values may be rounded (autocast, int8 blocks).
        silent: a backward that is announced at its first gradient only.
    """

    model: int
    announcement: Announcement
    sums: bool
    stays: bool = False
    rounds: bool = True
    silent: bool = False


@dataclass(frozen=True, slots=True)
class FirstGradient(ProtocolEvent):
    """A silent backward brings a gradient."""

    model: int


@dataclass(frozen=True, slots=True)
class Use(ProtocolEvent):
    """A kernel reads a unit: it must be gathered when the effects are done."""

    model: int
    unit: int


@dataclass(frozen=True, slots=True)
class Ready(ProtocolEvent):
    """The gradients of a unit are complete on this rank."""

    model: int
    unit: int


@dataclass(frozen=True, slots=True)
class SyncPoint(ProtocolEvent):
    """A collective of the user's begins, in the middle of passes, or of their loss.

    Attributes:
        values: as of a `Call`: what the ranks compare of it.
        backward: whether it is the backward of one that was made before.
        connects: whether what it gives is differentiated: its backward comes, if there is one.
    """

    values: tuple[int, ...] = ()
    backward: bool = False
    connects: bool = True


@dataclass(frozen=True, slots=True)
class Met(ProtocolEvent):
    """All ranks have come to a collective of the user's: what can start on each of them starts.

    Attributes:
        reducible: `Protocol.reducible` of each rank, when it came.
        connects: whether its backward comes by what another rank gives, and not by this one.
    """

    reducible: tuple[int, ...] = ()
    connects: bool = False


@dataclass(frozen=True, slots=True)
class EndForward(ProtocolEvent):
    """A forward is over."""

    model: int


@dataclass(frozen=True, slots=True)
class Finish(ProtocolEvent):
    """A backward is over on this rank, or a forward that no backward follows.

    left: (unit, whether its gradients are complete) of units with gradients that were not reduced.
    brings: whether it may have gradients of this rank. If no rank has any, nothing of it is kept.
    """

    model: int
    left: tuple[tuple[int, bool], ...] = ()
    brings: bool = True


@dataclass(frozen=True, slots=True)
class Failed(ProtocolEvent):
    """The pass of a model raised on this rank.

    astray: the error came from the communication itself, after which ranks may not be at one place.
    """

    model: int
    astray: bool


@dataclass(frozen=True, slots=True)
class GiveUp(ProtocolEvent):
    """Forget the pass of a model, and all that it has gathered. No other rank hears of it."""

    model: int


@dataclass(frozen=True, slots=True)
class Raised(ProtocolEvent):
    """This rank raised outside of a pass, and the others come to a round."""


@dataclass(frozen=True, slots=True)
class Call(ProtocolEvent):
    """A call that every rank makes together: one round, in which this rank serves the others.

    The values of all ranks are in `Protocol.heard`, when all make it; until then it is made again,
    with the values of that moment.
    """

    text: str
    values: tuple[int, ...] = ()
    serves: int = Served.ALL


@dataclass(frozen=True, slots=True)
class Noted(ProtocolEvent):
    """A call in which nothing crosses ranks: they compare it in the next round that there is."""

    text: str


@dataclass(frozen=True, slots=True)
class Pin(ProtocolEvent):
    """A `gathered()` block holds units, exactly, on all ranks. A call of all of them."""

    model: int
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unpin(ProtocolEvent):
    """A block of these units ends; None: a window, which has kept what it gathered."""

    model: int
    units: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Changed(ProtocolEvent):
    """The parameters changed: what was gathered of them is stale."""

    model: int


@dataclass(frozen=True, slots=True)
class Answer(ProtocolEvent):
    """What every rank said in the round that was read, or the values that were exchanged.

    None where a round was looked for, and some rank has not posted it; or where no reduction would
    start at once. Of values those that differ, in the order of the ranks.
    """

    said: Round | tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Broke(ProtocolEvent):
    """An effect raised; those after it were not done."""

    undone: tuple[Effect, ...]


# The record: where each model of a rank is in its pass, and which tasks remain.


@dataclass(frozen=True, kw_only=True)
class Course:
    """A model's pass on this rank: how far it is, what the others know of it, what it has done.

    A pass concerns the other ranks if something of it crosses ranks: parameters that are gathered,
    or gradients that are reduced. Such a phase is announced to them before anything crosses, and
    ended with them, or they are told that it failed: nobody waits for a rank that has gone on.

    Attributes:
        runs: a forward or a backward runs.
        inside: a forward has begun, and the pass is not over.
        crosses: something of the latest phase crosses ranks. An error on the way to its end, or
            behind that, is theirs too.
        announced: a phase was announced, and the ranks have not ended it.
        silent: a backward has begun, and the other ranks were not told yet.
        deferred: a backward is announced at its end only.
        calls: collectives of the user's of which the backward has not come yet.
        announcement: of the latest phase.
        place: the phase in which uses and reductions are recorded; None between passes.
        did: what was done in each phase of this pass.
        asked: whether this rank has asked for a collective that the plan did not have.
        replay: the place in the plan; None where ranks ask for each collective.
        due: units whose gradients are complete, and not handed to a reduction yet.
        left: (unit, whether complete) at the end of a backward, as far as no reduction has them.
        brings: whether the backward that ended may have brought gradients of this rank.
        learned: what the phases of the last pass do from now on, if that is new.
    """

    runs: bool = False
    inside: bool = False
    crosses: bool = False
    announced: bool = False
    silent: bool = False
    deferred: bool = False
    calls: int = 0
    announcement: Announcement | None = None
    place: Place | None = None
    did: Mapping[Place, Events] = field(default_factory=dict[Place, Events])
    asked: bool = False
    replay: Replay | None = None
    due: tuple[int, ...] = ()
    left: tuple[tuple[int, bool], ...] = ()
    brings: bool = True
    learned: Mapping[Place, Program] = field(default_factory=dict[Place, Program])

    @property
    def in_backward(self) -> bool:
        """Whether the latest phase is a backward."""
        return self.announcement is not None and self.announcement.place[1] != FORWARD

    def did_also(self, event: int) -> Course:
        """Record a use or a reduction."""
        if self.place is None:
            return self
        return replaced(self, did={**self.did, self.place: (*self.did[self.place], event)})


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of a rank: its units, and where it is."""

    units: Units
    residency: Residency
    course: Course = field(default_factory=Course)

    @property
    def may_not_wait(self) -> bool:
        """Whether this rank may not wait for a reduction in the middle of its backward.

        Another rank may wait for this one in the backward of a collective of the user's, and make
        behind it the gradients that the reduction waits for.
        """
        return self.course.calls > 0 and bool(self.units.bounded) and not self.units.gathers

    @property
    def gather(self) -> What:
        """How ranks ask for what is gathered now."""
        return What.GATHER if self.residency.rounds else What.GATHER_EXACT


class LocalCalls(NamedTuple):
    """The calls of a rank in which nothing crosses ranks: how many, a digest, and what is said.

    said: a line of what ranks announce; none where there were no such calls.
    """

    calls: int = 0
    digest: int = 0
    said: str = ""


NO_LOCAL_CALLS = LocalCalls()

Task = tuple[Any, ...]
"""What is still to do: a transition, and what it is given beside the protocol.

One that a rank goes on with when the others have answered is given their answer, too, at the end.
"""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One rank among the ranks of an axis: everything that decides when a collective starts.

    Attributes:
        models: by their numbers, which are the same on every rank.
        running: the models in a pass, in the order in which their passes began.
        open: the model whose announcement was posted and not read; None if there is none.
        posted: the last message of this rank.
        served: models of which reductions run that another rank has asked for.
        known: whether the last round ended in an error, on every rank.
        heard: the values of each rank in the last call; () until all of them make it.
        noted: calls in which nothing crosses ranks; each announcement says them.
        late: models in whose passes a collective of the user's came that only a backward has made.
        met: whether all ranks came to the last call by a plan, which is then the same, or none did.
        agenda: what is still to do of the event that is handled, the next task first.
        undone: effects that an error in another effect has prevented: the next event does them
            first, unless the pass is given up.

    Example:
        >>> from fzero.state.protocol import Join, Use, Units, advance
        >>> protocol, _ = advance(Protocol(), Join(1, Units(numels=(4, 4))))
        >>> sorted(protocol.models), protocol.running
        ([1], ())
    """

    models: Mapping[int, Model] = field(default_factory=dict[int, Model])
    running: tuple[int, ...] = ()
    open: int | None = None
    posted: Message | None = None
    served: tuple[int, ...] = ()
    known: bool = False
    heard: tuple[tuple[int, ...], ...] = ()
    noted: LocalCalls = NO_LOCAL_CALLS
    late: frozenset[int] = frozenset()
    met: bool = True
    agenda: tuple[Task, ...] = ()
    undone: tuple[Effect, ...] = ()

    @property
    def inside(self) -> tuple[int, ...]:
        """The models with a pass here that a collective of the user's comes in the middle of."""
        models = self.models.items()
        return tuple(n for n, one in models if n in self.running or one.course.inside)

    @property
    def under_way(self) -> tuple[int, ...]:
        """The models with a pass here that other ranks are in, or will hear of when it ends."""
        deferred = (n for n, one in self.models.items() if one.course.deferred)
        return *self.running, *(n for n in deferred if n not in self.running)

    @property
    def meeting(self) -> tuple[int, ...]:
        """Those of stage 3 that run: a collective of the user's is in their order, and is met."""
        return tuple(n for n in self.running if self.models[n].units.gathers)

    @property
    def reducible(self) -> int:
        """A code of how many reductions below stage 3 can start, and of which model; 0 for none.

        See `common`.
        """
        if len(self.running) != 1:
            return 0
        (number,) = self.running
        model, course = self.models[number], self.models[number].course
        if not model.units.bounded or model.units.gathers or course.replay is None:
            return 0
        count = replay.start_ready(course.replay, model.residency, course.due)[0].started
        return count and count + MANY * number

    def put(self, number: int, **changes: Any) -> Protocol:
        """Return the protocol with other values of some fields of a model."""
        model = replaced(self.models[number], **changes)
        return replaced(self, models={**self.models, number: model})

    def then(self, *tasks: Task) -> Protocol:
        """Return the protocol that does these tasks next, in this order."""
        return replaced(self, agenda=(*tasks, *self.agenda))

    def without(self, number: int) -> Protocol:
        """Return the protocol with a model that is in no pass."""
        return replaced(self, running=tuple(n for n in self.running if n != number))


Next = tuple[Protocol, tuple[Effect, ...]]

# What each event does.


def advance(protocol: Protocol, event: ProtocolEvent) -> tuple[Protocol, tuple[Effect, ...]]:
    """Return the record after an event, and the effects to perform, in this order.

    If the last effect brings an `Answer`, the event goes on with it: `advance` the record with that
    before any other event. Else it is over.

    Example:
        >>> from fzero.state.protocol import Announcement, Units
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
    p, collected, effects = protocol, list[Effect](), tuple[Effect, ...]()
    if p.undone and not isinstance(event, Failed | GiveUp | Broke):
        collected += p.undone  # the other ranks have started these collectives
        p = replaced(p, undone=())
    if isinstance(event, Answer):  # the task that waits goes on with it
        task, *rest = p.agenda
        p = replaced(p, agenda=((*task, event.said), *rest))
        failed = isinstance(event.said, Round) and event.said.failed
        if failed and task[0] is not all_know:  # an error of other ranks ends the event
            p, effects = all_know(replaced(p, agenda=(), open=None))
            effects = *effects, Raise(tuple(failed))
    else:
        p, effects = _STEPS[type(event)](p, event)
    collected += effects
    while p.agenda:
        last = effects[-1] if effects else None
        if isinstance(last, Read | Look) or (isinstance(last, Exchange) and last.value is not None):
            break  # it brings an answer, with which the next task goes on
        (step, *args), *rest = p.agenda
        p, effects = step(replaced(p, agenda=tuple(rest)), *args)
        collected += effects
    return p, tuple(collected)


def broke(p: Protocol, event: Broke) -> Next:
    """An effect raised: give up the rest of its event, except what other ranks wait for."""
    kept = Gather | TakePart | Wait | Free | Reduce
    undone: list[Effect] = []
    for effect in event.undone:
        if isinstance(effect, kept):
            undone.append(effect)
        elif isinstance(effect, Exchange):  # the others have nothing of this pass from here
            undone.append(Exchange(None))
    unposted = any(isinstance(x, Post) for x in event.undone)
    still_open = None if unposted else p.open
    return replaced(p, agenda=(), undone=tuple(undone), open=still_open), ()


def join(p: Protocol, event: Join) -> Next:
    """Register a model, with the units that a window has gathered; they are pinned."""
    whole = frozenset(event.gathered)
    here = Residency(
        model=event.model,
        units=event.units,
        gathered=(*event.gathered,),
        pinned=whole,
        inexact=event.units.rounds.intersection(whole),
        seen=whole,
    )
    model = Model(units=event.units, residency=here)
    return replaced(p, models={**p.models, event.model: model}), ()


def leave(p: Protocol, event: Leave) -> Next:
    """Forget a model."""
    models = {number: model for number, model in p.models.items() if number != event.model}
    return replaced(p.without(event.model), models=models), ()


# A forward or a backward begins.


def begin(p: Protocol, event: Begin) -> Next:
    """Begin a phase: announce it now if anything of it crosses ranks, and it is not silent.

    What an earlier forward gathered, and nobody has ended, is ended with this one.
    """
    number, model = event.model, p.models[event.model]
    here, frees = replaced(model.residency, stays=event.stays, rounds=event.rounds), ()
    if not event.rounds:  # a window may have brought rounded values
        here, frees = residency.drop_inexact(here, here.gathered)
    reads = model.units.gathers and len(here.pinned) < len(model.units.numels)
    gathers, is_forward = reads or model.course.announced, event.announcement.place[1] == FORWARD
    if is_forward:
        p = replaced(p, known=False)  # an error of the pass before does not concern this one
        calls = max((one.course.calls for one in p.models.values() if one.course.inside), default=0)
    else:
        calls = model.course.calls + (number in p.late)
    course = replaced(
        model.course,
        announcement=event.announcement,
        runs=True,
        inside=True,
        crosses=gathers or event.sums,
        announced=False,
        silent=event.silent,
        deferred=False,
        calls=calls,
    )
    p, tells = (
        p.put(number, course=course, residency=here),
        gathers if is_forward else course.crosses,
    )
    if event.silent or not tells:
        return p, frees
    p, posts = announce(p, number)
    return p, (*frees, *posts)


def first_gradient(p: Protocol, event: FirstGradient) -> Next:
    """Announce a silent backward, which now has a gradient to reduce."""
    course = replaced(p.models[event.model].course, silent=False)
    p = p.put(event.model, course=course)
    return announce(p, event.model) if course.crosses else (p, ())


def announce(p: Protocol, number: int) -> Next:
    """Post the announcement of a phase; its answer is read when a collective depends on it.

    A backward below stage 3 beside the pass of another model is announced at its end, as long as
    collectives of the user's are to come: plans run one at a time, and a rank that goes from one to
    another would wait in the middle of a backward, see `Model.may_not_wait`.
    """
    model, course = p.models[number], p.models[number].course
    said = course.announcement
    assert said is not None
    others = [one for n, one in p.models.items() if n != number]
    beside = course.calls > 0 and any(one.course.inside for one in others)
    if beside and not model.units.gathers and not course.deferred:
        return p.put(number, course=replaced(course, deferred=True)), ()
    if ends := ends_of_others(p, number):
        return p.then(*ends, (announce, number)), ()
    here, frees = residency.release(replaced(model.residency, current=-1))
    # What is here already is part of what ranks must have in common to follow one plan.
    facts = said.program and (said.program.digest, sorted(here.pinned))
    expected = facts, model.units.gathers or course.calls
    message = Message(
        MessageKind.PASS,
        f"{said.text}\nphase {said.place[1]}{'' if said.served else p.noted.said}",
        hint=zlib.crc32(repr(expected).encode()),
        served=said.served,
    )
    did = {**course.did, said.place: ()}
    course = replaced(course, announced=True, did=did, place=said.place)
    p = p.put(number, course=course, residency=here).without(number)
    p = replaced(p, running=(*p.running, number), open=number, posted=message, known=False)
    return p, (*frees, Post(message))


# What the ranks have announced, and the plan that they follow.


def read_announcement(p: Protocol, number: int, *tasks: Task) -> Next:
    """Read what was announced, if it was not read; then do these tasks."""
    if p.open != number:
        return p.then(*tasks), ()
    return p.then((heard_announcement, number), *tasks), (Read(),)


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
    model, course, effects = p.models[number], p.models[number].course, tuple[Effect, ...]()
    program, persistent = (
        course.announcement and course.announcement.program,
        model.units.persistent,
    )
    if program is not None and said.is_same and said.is_in_order:
        if persistent:
            p, effects = pin_persistent(p, number)
        place = replay.begin(program, p.models[number].residency)
        return p.put(number, course=replaced(course, replay=place)), effects
    p = p.put(number, course=replaced(course, asked=True))
    missing = tuple(u for u in persistent if u not in model.residency.gathered)
    asks = [(ask, number, model.gather, missing)] if missing else []
    return p.then(*asks, (pin_persistent, number)), ()


def pin_persistent(p: Protocol, number: int) -> Next:
    """Gather the missing persistent units, and pin all of them."""
    here, collected = p.models[number].residency, list[Effect]()
    units = here.units.persistent
    for unit in units:
        here, starts = residency.gather(here, unit)
        collected += starts
    here, waits = residency.wait(residency.pin(here, units), units)
    here = replaced(here, seen=here.seen.union(units))
    return p.put(number, residency=here), (*collected, *waits)


def run_plan(p: Protocol, number: int, ends: bool = False) -> Next:
    """Run the plan to its next sync point, or to its end.

    ends: leave it at a sync point which this phase never reached: it did something else.
    """
    model, course = p.models[number], p.models[number].course
    if p.open == number or course.due:
        first = read_announcement if p.open == number else reduce_due
        return p.then((first, number), (run_plan, number, ends)), ()
    if course.replay is None:
        return p, ()
    p, effects = go_on(p, number, replay.to_sync_point(course.replay, model.residency))
    course = p.models[number].course
    if ends and course.replay is not None:
        p = p.put(number, course=replaced(course, replay=None, asked=True))
    return p, effects


def is_planned(p: Protocol, number: int) -> bool:
    """Whether there is something of the plan of a model to run or to read."""
    course = p.models[number].course
    return p.open == number or bool(course.due) or course.replay is not None


def ends_of_others(p: Protocol, number: int) -> list[Task]:
    """What ends the plans of all other models: one plan runs at a time."""
    return [(run_plan, n, True) for n in p.running if n != number and is_planned(p, n)]


def go_on(
    p: Protocol, number: int, to: tuple[Replay | None, Residency, tuple[Effect, ...]]
) -> Next:
    """Be at another place of the plan; what it has reduced on the way is not left any more."""
    place, here, effects = to
    course = replaced(p.models[number].course, replay=place)
    if course.left:
        reduced = {effect.unit for effect in effects if isinstance(effect, Reduce)}
        course = replaced(course, left=tuple(x for x in course.left if x[0] not in reduced))
    return p.put(number, course=course, residency=here), effects


# A unit is used.

LIVE = 2
"""Units gathered at once while a rank asks: the one in use, and the one before it."""


def use(p: Protocol, e: Use) -> Next:
    """A kernel reads a unit: record that, and go to it in the plan, which gathers it ahead."""
    number, unit, model = e.model, e.unit, p.models[e.model]
    here, course, frees = model.residency, model.course, tuple[Effect, ...]()
    if here.is_current(unit):
        return p, ()
    if p.open == number:
        return read_announcement(p, number, (use, e))
    if not here.rounds:  # a read outside of a pass, of a unit that the pass has rounded
        here, frees = residency.drop_inexact(here, [unit])
    gathered = here.gathered
    if unit in gathered:  # the most recently used comes last
        gathered = *(other for other in gathered if other != unit), unit
    here = replaced(here, gathered=gathered, current=unit)
    if unit not in here.seen:
        course = course.did_also(unit)
        if model.units.limits.keeps:
            here = replaced(here, seen=here.seen | {unit})
    if course.replay is None or course.replay.waits:
        p = p.put(number, residency=here, course=course)
        return p.then((gather_unit, number, unit)), frees
    there = replay.use(course.replay, here, unit)
    if there is None and not here.has(unit):
        # It is asked for at the next sync point, or at the end of the plan.
        p = p.put(number, residency=here, course=replaced(course, asked=True))
        return p.then((run_plan, number), (gather_unit, number, unit)), frees
    # The plan is followed: nobody has to be asked on the way.
    place, here, effects = there or (course.replay, here, ())
    here, waits = residency.wait(here, [unit])
    p = p.put(number, residency=here, course=replaced(course, replay=place))
    return p, (*frees, *effects, *waits)


def gather_unit(p: Protocol, number: int, unit: int) -> Next:
    """Wait for a unit; ask the other ranks for it first unless it is gathered or in flight."""
    model, here = p.models[number], p.models[number].residency
    if here.has(unit):
        here, waits = residency.wait(here, [unit])
        return p.put(number, residency=here), waits
    if model.course.replay is None:
        loose = [unit for unit in here.gathered if unit not in here.pinned]
        here, frees = residency.free(here, loose[: max(0, len(loose) - LIVE + 1)])
        p = p.put(number, residency=here)
    else:  # the rest of what is here belongs to the plan
        p, frees = go_on(p, number, replay.gather_beside(model.course.replay, here, unit))
    return p.then((ask, number, model.gather, (unit,)), (gather_unit, number, unit)), frees


def ask(p: Protocol, number: int, what: What, units: tuple[int, ...]) -> Next:
    """Ask all ranks to take part, after the plans of other models have come to their ends."""
    if ends := ends_of_others(p, number):
        return p.then(*ends, (ask, number, what, units)), ()
    return say(p, asking(number, what, units), (heard_asks, number, what, units))


def heard_asks(p: Protocol, number: int, what: What, units: tuple[int, ...], said: Round) -> Next:
    """Take part in what any rank asked for in this round; ask for what was not in it."""
    p, effects = serve(p, said, frozenset(Asked(number, what, unit) for unit in units))
    rest = tuple(unit for unit in units if Asked(number, what, unit) not in said.asked)
    return p.then(*[(ask, number, what, rest)] * bool(rest)), effects


# The gradients of a unit are complete.


def ready(p: Protocol, e: Ready) -> Next:
    """Reduce a unit.

    Below stage 3, while another rank has not begun its backward, this one goes on with its own,
    with one bucket to scatter at most; with any number where it may not wait.
    """
    model = p.models[e.model]
    if model.course.deferred:  # it is left at the end
        return p, ()
    units, course = model.units, model.course.did_also(~e.unit)
    due = *course.due, e.unit
    p = p.put(e.model, course=replaced(course, due=due))
    few = model.may_not_wait or sum(unit in units.bounded for unit in due) <= 1
    if p.open == e.model and few and not units.gathers:
        return p.then((heard_first, e.model)), (Read(waits=False),)
    return read_announcement(p, e.model, (reduce_due, e.model))


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
    waits = model.may_not_wait
    most = 0 if waits else None
    to = replay.start_ready(course.replay, model.residency, course.due, most)
    return go_on(p.then(*[(look_for_room, number)] * waits), number, to)


def look_for_room(p: Protocol, number: int) -> Next:
    """Start what is ready for as long as no reduction has to wait for another one."""
    model, place = p.models[number], p.models[number].course.replay
    if place is None or not replay.start_ready(place, model.residency)[2]:
        return p, ()
    return p.then((start_one, number)), (Look(number),)


def start_one(p: Protocol, number: int, said: tuple[()] | None) -> Next:
    """Start one reduction if it need not wait; what is left starts later, at the end at last."""
    model = p.models[number]
    if said is None or model.course.replay is None:
        return p, ()
    one = replay.start_ready(model.course.replay, model.residency, most=1)
    return go_on(p.then((look_for_room, number)), number, one)


# A phase is over.


def end_forward(p: Protocol, event: EndForward) -> Next:
    """A forward is over that a backward may follow: free what it gathered, unless it stays."""
    number, model = event.model, p.models[event.model]
    if model.course.announced and is_planned(p, number):
        return p.then((run_plan, number, True), (end_forward, event)), ()
    # No unit is current, for its values may be rounded: a read outside of a pass is exact.
    here, frees = replaced(model.residency, current=-1, rounds=False), tuple[Effect, ...]()
    if model.course.announced:
        p = p.without(number)
        here, frees = residency.release(here)
    return p.put(
        number, course=replaced(model.course, runs=False, place=None), residency=here
    ), frees


def finish(p: Protocol, event: Finish) -> Next:
    """A backward is over, or a forward that none follows: end it with the others who know of it."""
    number, model = event.model, p.models[event.model]
    if model.course.deferred and not model.course.announced:
        return announce(p.then((finish, event)), number)
    course = replaced(
        model.course,
        runs=False,
        inside=False,
        announced=False,
        silent=False,
        deferred=False,
        left=event.left,
        brings=event.brings,
        learned={},
    )
    if not model.course.announced:
        here, waits = replaced(model.residency, current=-1, rounds=False), tuple[Effect, ...]()
        if here.stays:
            here, waits = residency.wait(here, sorted(here.pinned))
        return p.put(number, course=course, residency=here), waits
    # Recorded here, for the rest of the plan may reduce them: else it would be forgotten next time.
    for unit in (unit for unit, complete in event.left if not complete):
        course = course.did_also(~unit)
    p, ends = p.put(number, course=course), ((run_plan, number, True), (say_done, number))
    if not model.may_not_wait:
        return p.then(*ends), ()
    # Ranks that may not wait for reductions wait for each other in a round before the last ones. A
    # rank that raised says so there: until then it starts none.
    return read_announcement(p, number, (say_end, number), *ends)


def say_end(p: Protocol, number: int) -> Next:
    """Say that this rank has no more gradients, if all ranks follow one plan."""
    course = p.models[number].course
    if course.replay is None:
        return p, ()
    return say(p, Message(MessageKind.DONE, hint=BROUGHT * course.brings), (heard_end,))


def heard_end(p: Protocol, _: Round) -> Next:
    """All ranks have come to the end of their backwards."""
    return p, ()


def say_done(p: Protocol, number: int) -> Next:
    """Ask for the reductions that no plan has started; then say that this rank is done."""
    course = p.models[number].course
    if course.left:
        p = p.put(number, course=replaced(course, left=(), asked=True))
        units = tuple(unit for unit, _ in course.left)
        return p.then((ask, number, What.REDUCE, units), (say_done, number)), ()
    if ends := ends_of_others(p, number):
        return p.then(*ends, (say_done, number)), ()
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
    model, course = p.models[number], p.models[number].course
    if course.in_backward and not said.has_brought:
        effects = *effects, Discard(number)
    here = replaced(model.residency, current=-1, rounds=False)
    here, ends = residency.end_backward(here)
    if here.stays:  # what a window keeps may be carried from here
        here, waits = residency.wait(here, sorted(here.pinned))
        ends = *ends, *waits
    after = Course(crosses=course.crosses, calls=course.calls)
    p = p.put(number, course=after, residency=here).without(number)
    if not said.has_asked:
        return p, (*effects, *ends)
    told = Exchange((number, dict(course.did)))
    return p.then((heard_programs, number)), (*effects, *ends, told)


def heard_programs(p: Protocol, number: int, values: tuple[Any, ...]) -> Next:
    """Learn the programs of all ranks in this pass: the schedule expects them from now on.

    A rank that was in no pass, or in one of another model, has none.
    """
    model = p.models[number]
    mine = [did for one, did in filter(None, values) if one == number]
    learned = joined(mine, len(model.units.numels))
    return p.put(number, course=replaced(model.course, learned=learned)), ()


def over(p: Protocol, said: Round) -> Next:
    """No rank is in a pass: what this rank has served of other passes is complete.

    A backward that ends here takes it itself. What brought nothing to any rank changes nothing.
    """
    takes = {n for n in p.running if p.models[n].course.in_backward}
    complete = Receive if said.has_brought else Discard
    received = (complete(model) for model in p.served if model not in takes)
    return replaced(p, served=()), (WaitForReductions(), *received)


# A collective of the user's.

SYNC = "a collective of the user's (psum, all_gather, ...)"


def sync_point(p: Protocol, e: SyncPoint) -> Next:
    """Run the plan to its sync point, and wait for ranks there: they serve each other until then.

    It is recorded like the use of a unit that is always here. Below stage 3 reductions go on beside
    it, over a group of their own; no rank waits for one in a backward until the last has come. The
    first one that only a backward makes ends the plan; later backwards of these models expect one.
    """
    late = list[int]()
    for number in p.inside:
        course = p.models[number].course
        if not (e.connects or e.backward or course.runs):
            continue  # a metric, after the forward
        calls = course.calls + 1  # also without a backward: `remat` may make it anew there
        if e.backward and course.in_backward:
            calls = max(0, course.calls - 1)
        if course.inside:
            p = p.put(number, course=replaced(course, calls=calls))
        late += [number] * (course.in_backward and not course.calls)
    at = p.meeting
    if at:
        reads = [(read_announcement, number) for number in at]
        return p.then(*reads, (enter_sync, at, e.values)), ()
    if not late:
        return p, ()
    # Nobody knew of it: a rank may wait for a reduction of the plan.
    p = replaced(p, late=p.late.union(p.inside))
    return p.then(*((run_plan, n, True) for n in late if n in p.running)), ()


def enter_sync(p: Protocol, at: tuple[int, ...], values: tuple[int, ...]) -> Next:
    """Arrive at the sync point of these models, and wait for the other ranks there."""
    away = list[Task]()
    for number in at:
        model = p.models[number]
        course = model.course.did_also(len(model.units.numels))
        away.append((leave_sync, number, course.replay is not None))
        p = p.put(number, course=course, residency=replaced(model.residency, current=-1))
    ahead = [(run_plan, number) for number in at]
    ends = [(run_plan, number, True) for number in p.running if number not in at]
    return p.then(*ahead, *ends, (call, Call(SYNC, values), True), *away), ()


def leave_sync(p: Protocol, number: int, had_plan: bool) -> Next:
    """Leave the sync point: from here on all ranks follow one order again."""
    model, course = p.models[number], p.models[number].course
    if course.replay is None:
        asked = course.asked or had_plan  # which did not have this sync point
        return p.put(number, course=replaced(course, asked=asked)), ()
    if p.met:
        return go_on(p, number, replay.leave_sync_point(course.replay, model.residency))
    # A rank that came from another pass does not follow the plan.
    _, here, frees = replay.free_beside(course.replay, model.residency)
    p = p.put(number, course=replaced(course, replay=None, asked=True), residency=here)
    return p, frees


def met_all(p: Protocol, e: Met) -> Next:
    """All ranks are at the sync point: expect its backward; start what every rank can.

    That are as many reductions of one model as none of them is kept waiting for.
    """
    for number in p.inside if e.connects else ():
        course = p.models[number].course
        if course.inside and not course.runs:  # else it was counted, whoever differentiates it
            p = p.put(number, course=replaced(course, calls=course.calls + 1))
    number, count = divmod(min(e.reducible, default=0), MANY)
    if not count or any(code // MANY != number for code in e.reducible):
        return p, ()
    model, course = p.models[number], p.models[number].course
    assert course.replay is not None
    p = p.put(number, course=replaced(course, due=()))
    most = max(0, count - course.replay.started)
    return go_on(p, number, replay.start_ready(course.replay, model.residency, course.due, most))


# A call that all ranks make.


def call(p: Protocol, e: Call, again: bool = False) -> Next:
    """Make one round of a call, in which ranks that are in a pass are served.

    again: make it until every rank makes it. Its hint is whether this rank is at a sync point.
    """
    if p.open is not None:
        tasks = [(call, e, True)] if again else []
        return read_announcement(replaced(p, heard=()), p.open, *tasks)
    places = (p.models[number].course.replay for number in p.running)
    waits = any(place is not None and place.waits for place in places)
    said = f"{e.text}{p.noted.said}"
    message = Message(MessageKind.CALL, said, int(waits), served=e.serves, codes=e.values)
    return say(p, message, (heard_call, e if again else None))


def heard_call(p: Protocol, again: Call | None, said: Round) -> Next:
    """All are heard if every rank makes this call."""
    if said.kinds <= {MessageKind.PASS, MessageKind.CALL}:
        everybody = MessageKind.PASS not in said.kinds
        if not said.is_same and (everybody or not said.is_served):
            return differ(p)
        if everybody:
            return replaced(p, heard=said.values, met=said.is_in_order), ()
    p = replaced(p, heard=()).then(*[(call, again, True)] * (again is not None))
    if said.is_over:
        p, effects = over(p, said)
        # Those that end their pass tell what they did, if any of them has asked.
        return p, (*effects, *(Exchange(None),) * said.has_asked)
    return serve(p, said)


def noted(p: Protocol, e: Noted) -> Next:
    """Count a call that the next round compares; one in a loss changes no state of the step."""
    if p.inside:
        return p, ()
    digest, calls = zlib.crc32(e.text.encode(), p.noted.digest), p.noted.calls + 1
    said = f"\nlocal calls before: {calls}, the last {e.text} ({digest:08x})"
    return replaced(p, noted=LocalCalls(calls, digest, said)), ()


# Units that are pinned between passes.


def pin(p: Protocol, e: Pin) -> Next:
    """A block holds units exactly; inside of a pass it does not: the pass says what is here.

    Rounded values go, and all ranks are asked whether a unit is missing on any of them.
    """
    number, here = e.model, p.models[e.model].residency
    if here.rounds:
        return p, ()
    if ends := ends_of_others(p, number):
        return p.then(*ends, (pin, e)), ()
    here, frees = residency.drop_inexact(here, e.units)
    missing = any(unit not in here.gathered for unit in e.units)
    same = Call(f"gathered(...) of units {[*e.units]} of model {number}", (int(missing),))
    p = p.put(number, residency=here)
    return p.then((call, same, True), (hold, number, e.units)), frees


def hold(p: Protocol, number: int, units: tuple[int, ...]) -> Next:
    """Hold units: each is gathered on all ranks if any is missing on any of them."""
    here, collected = p.models[number].residency, list[Effect]()
    for unit in units if any(missing for (missing,) in p.heard) else ():
        if here.has(unit):
            collected.append(TakePart(number, unit, exact=True))
            continue
        here, starts = residency.start(here, unit, inexact=False)
        here, waits = residency.wait(here, [unit])
        collected += [*starts, *waits]
    return p.put(number, residency=residency.open_block(here, units)), tuple(collected)


def unpin(p: Protocol, e: Unpin) -> Next:
    """A block ends, or a window: free what nothing else needs."""
    here = p.models[e.model].residency
    if e.units is None:
        here, frees = residency.end_backward(replaced(here, stays=False))
    else:
        here, frees = residency.close_block(here, e.units)
    return p.put(e.model, residency=here), frees


def changed(p: Protocol, e: Changed) -> Next:
    """Free all gathered units: the parameters changed."""
    here, frees = residency.release(p.models[e.model].residency, pinned=True)
    return p.put(e.model, residency=here), frees


# An error.


def failed(p: Protocol, event: Failed) -> Next:
    """The pass raised on this rank: end it in step with the others; tell them if they must know.

    They do if it did not end in the same round. After an error of the communication ranks may not
    be at one place: then nobody can be reached.
    """
    number, model = event.model, p.models[event.model]
    in_step = model.course.crosses and (p.known or not event.astray)
    tells = in_step and not p.known
    effects: tuple[Effect, ...] = (Drop(number), *(p.undone if in_step else ()))
    p = replaced(p.put(number, course=replaced(model.course, due=())), undone=())
    more = (*ends_of_others(p, number), (raised, Raised())) if tells else ()
    # It runs what is left of its plan, with zeros, for the others wait for its part.
    end = ((run_plan, number, True),) if in_step else ()
    if tells and model.may_not_wait:  # the others wait in a round, or will come to one
        return p.then((read_announcement, number), *more, *end), effects
    return p.then(*end, *more), effects


def give_up(p: Protocol, event: GiveUp) -> Next:
    """Forget the pass."""
    number, model = event.model, p.models[event.model]
    here, frees = residency.release(replaced(model.residency, rounds=False), pinned=True)
    p = p.put(number, course=Course(), residency=here).without(number)
    p = replaced(p, undone=(), open=None if p.open == number else p.open)
    return p, (Discard(number), *frees)


def raised(p: Protocol, _: Raised) -> Next:
    """Say that this rank raised. The others raise where they read it."""
    return say(p, Message(MessageKind.FAILED), (all_know,))


def differ(p: Protocol) -> Next:
    """The ranks make different calls: all of them raise."""
    p, effects = all_know(replaced(p, agenda=(), open=None, noted=NO_LOCAL_CALLS))
    return p, (*effects, Raise())


def all_know(p: Protocol, _: Round | None = None) -> Next:
    """All ranks know of an error: what this one has served of the passes is discarded, as there."""
    dropped = (Discard(model) for model in p.served)
    return replaced(p, known=True, served=()), (WaitForReductions(), *dropped)


# A round.


def say(p: Protocol, message: Message, task: Task) -> Next:
    """Post a message; the task goes on with the answer."""
    p = replaced(p, posted=message, known=False)
    return p.then(task), (Post(message), Read())


def serve(p: Protocol, said: Round, mine: frozenset[Asked] = frozenset()) -> Next:
    """Take part in every collective that a rank asks for, in one order."""
    collected: list[Effect] = []
    for one in said.asked:
        number, unit, model = one.model, one.unit, p.models.get(one.model)
        if one.what is What.REDUCE:
            if number not in p.served:
                p = replaced(p, served=(*p.served, number))
            collected.append(Reduce(number, unit, mine=one in mine))
            continue
        if model is None:  # the performer says that it is gone
            collected.append(TakePart(number, unit, exact=True))
            continue
        here = model.residency
        # Outside of a pass nothing would end what is kept for one.
        keeps = model.units.limits.keeps and number in p.running
        inexact = one.what is What.GATHER and unit in model.units.rounds
        if keeps:
            here = residency.pin(here, [unit])
        if here.has(unit) or not (one in mine or keeps):
            collected.append(TakePart(number, unit, exact=not inexact))
        else:
            here, starts = residency.start(here, unit, inexact=inexact)
            here, waits = residency.wait(here, [unit])
            collected += [*starts, *waits]
        p = p.put(number, residency=here)
    return p, tuple(collected)


_STEPS: dict[type, Callable[[Protocol, Any], Next]] = {
    Join: join,
    Leave: leave,
    Begin: begin,
    FirstGradient: first_gradient,
    Use: use,
    Ready: ready,
    SyncPoint: sync_point,
    Met: met_all,
    EndForward: end_forward,
    Finish: finish,
    Failed: failed,
    GiveUp: give_up,
    Raised: raised,
    Call: call,
    Noted: noted,
    Pin: pin,
    Unpin: unpin,
    Changed: changed,
    Broke: broke,
}
"""What each event does first."""
