"""The events of a rank: what its driver does, and what the other ranks answered.

`model` is the number of a model on its axis: the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fzero.state.effects import Effect
from fzero.state.residency import Units
from fzero.state.rounds import Round
from fzero.state.schedule import Place, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a rank announces of a phase.

    Attributes:
        text: what must be equal on all ranks for their phases to go together.
        place: which pass since the update, and which phase of it.
        program: what the phase is expected to do; None if nothing was recorded.
        served: ranks that make a call meanwhile take part in it.
    """

    text: str
    place: Place
    program: Program | None = None
    served: bool = False


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
        dropped: this rank has just thrown its gradients away.
    """

    model: int
    announcement: Announcement
    sums: bool
    stays: bool = False
    rounds: bool = True
    silent: bool = False
    dropped: bool = False


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
    brings: whether there may be gradients of this rank in it: if no rank has any, what the plan has
        reduced is dropped.
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
    with the values of that moment. has_plan: whether this rank is at a sync point of a plan.
    """

    text: str
    values: tuple[int, ...] = ()
    has_plan: bool = False


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
