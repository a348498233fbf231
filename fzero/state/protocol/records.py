"""The protocol's record: where each model of a rank is in its pass, and which tasks remain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fzero.state.effects import Effect, replaced
from fzero.state.pass_state import FORWARD, PassState
from fzero.state.protocol.events import Announcement
from fzero.state.replay import Replay, complete, reducible
from fzero.state.residency import Residency, Units
from fzero.state.rounds import MANY, Message, What
from fzero.state.schedule import Events, Place, Program


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a model has used and reduced in its pass, and its place in the plan.

    Attributes:
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

    residency: Residency
    phase: PassState = field(default_factory=PassState)
    course: Course = field(default_factory=Course)

    @property
    def units(self) -> Units:
        """Static facts about its units."""
        return self.residency.units

    @property
    def rounds(self) -> bool:
        """Whether what is gathered now may be rounded."""
        return self.residency.rounds

    @property
    def may_not_wait(self) -> bool:
        """Whether this rank may not wait for a reduction in the middle of its backward.

        Another rank may wait for this one in the backward of a collective of the user's, and make
        behind it the gradients that the reduction waits for.
        """
        return self.phase.calls > 0 and bool(self.units.bounded) and not self.units.gathers

    @property
    def gather(self) -> What:
        """How ranks ask for what is gathered now."""
        return What.GATHER if self.rounds else What.GATHER_EXACT


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
        return tuple(n for n, one in models if n in self.running or one.phase.inside)

    @property
    def under_way(self) -> tuple[int, ...]:
        """The models with a pass here that other ranks are in, or will hear of when it ends."""
        deferred = (n for n, one in self.models.items() if one.phase.deferred)
        return *self.running, *(n for n in deferred if n not in self.running)

    @property
    def meeting(self) -> tuple[int, ...]:
        """Those of stage 3 that run: a collective of the user's is in their order, and is met."""
        return tuple(n for n in self.running if self.models[n].units.gathers)

    @property
    def calls(self) -> int:
        """Collectives of the user's whose backward will come in the passes that run here."""
        return max((one.phase.calls for one in self.models.values() if one.phase.inside), default=0)

    def defers(self, number: int) -> bool:
        """Whether a backward below stage 3 is announced at its end.

        Plans run one at a time, and a rank that goes from one to another would wait in the middle
        of a backward, see `may_not_wait`. So beside another pass there is no plan until all
        collectives of the user's are over.
        """
        others = (one for n, one in self.models.items() if n != number)
        mine = self.models[number]
        alone = not any(one.phase.inside for one in others)
        return not (alone or mine.units.gathers) and mine.phase.calls > 0

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
        count = reducible(complete(course.replay, course.due))
        return count and count + MANY * number

    def put(self, number: int, **changes: Any) -> Protocol:
        """Return the protocol with other values of some fields of a model."""
        model = replaced(self.models[number], **changes)
        return replaced(self, models={**self.models, number: model})

    def holding(self, number: int, to: tuple[Residency, tuple[Effect, ...]]) -> Next:
        """Return the protocol with another residency of a model, and the effects of that."""
        return self.put(number, residency=to[0]), to[1]

    def then(self, *tasks: Task) -> Protocol:
        """Return the protocol that does these tasks next, in this order."""
        return replaced(self, agenda=(*tasks, *self.agenda))

    def without(self, number: int) -> Protocol:
        """Return the protocol with a model that is in no pass."""
        return replaced(self, running=tuple(n for n in self.running if n != number))


Next = tuple[Protocol, tuple[Effect, ...]]
