"""Tasks: the steps of an event. A task may wait for an answer of the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.state.rounds import What
from fzero.state.schedule import Program


@dataclass(frozen=True, slots=True)
class Announce:
    """Post the announcement of a model's phase."""

    model: int


@dataclass(frozen=True, slots=True)
class Learn:
    """Read what the other ranks announced, if that was not done."""

    model: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Gather and pin the persistent units of a model."""

    model: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Begin the plan of a program."""

    model: int
    program: Program


@dataclass(frozen=True, slots=True)
class EndPlan:
    """Run the plan of a model to its end."""

    model: int


@dataclass(frozen=True, slots=True)
class EndOthers:
    """Run the plans of all other models to their ends: one plan runs at a time."""

    model: int


@dataclass(frozen=True, slots=True)
class Walk:
    """Run the plan to its next sync point, or to its end."""

    model: int


@dataclass(frozen=True, slots=True)
class ClosePlan:
    """Leave a plan whose sync point never came."""

    model: int


@dataclass(frozen=True, slots=True)
class ReduceDue:
    """Start the reductions that are due, or ask for them."""

    model: int


@dataclass(frozen=True, slots=True)
class Reach:
    """Go to a unit in the plan."""

    model: int
    unit: int


@dataclass(frozen=True, slots=True)
class Obtain:
    """Ask for a unit if the plan did not gather it; wait for it."""

    model: int
    unit: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask all ranks to take part in collectives."""

    model: int
    what: What
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskNow:
    """Ask in the next round, and in those after it for what a message has no room for."""

    model: int
    what: What
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskLeft:
    """Ask for the reductions of what is left at the end of a backward."""

    model: int


@dataclass(frozen=True, slots=True)
class Arrive:
    """Be at a sync point, and wait there for the other ranks, which hear this one's `values`."""

    model: int
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait for the other ranks at a sync point."""

    model: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave a sync point, to which this rank came by a plan or not: all ranks have come."""

    model: int
    had_plan: bool


@dataclass(frozen=True, slots=True)
class EndOfForward:
    """Free what a forward has gathered."""

    model: int


@dataclass(frozen=True, slots=True)
class SayDone:
    """Take part in what other ranks need until no rank is in a pass."""

    model: int


@dataclass(frozen=True, slots=True)
class EndOfPass:
    """Free what was kept for the pass; learn what the ranks did, if any has `asked`."""

    model: int
    asked: bool


@dataclass(frozen=True, slots=True)
class DropInexact:
    """Free rounded values of units, which a block is to read exactly."""

    model: int
    units: tuple[int, ...]
