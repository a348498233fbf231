"""What a transition asks for: a closed set of records, data and nothing else.

Whoever made the transition matches on the type and does what is asked; a test compares with `==`.
Nothing here holds a tensor, a stream or a callable.

    of the hooks     RunEpilogue  QueueCallback  DropBackward      done by the engine
    of the protocol  Post  Read  Exchange  Raise                   done by the performer
                     Gather  Wait  Free  TakePart                  done by the gatherer of a model
                     Look  Reduce  WaitForReductions               done by the reducers
                     Drop  Discard
                     Receive                                       done by the driver of a model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from fzero.state.rounds import Message


@dataclass(frozen=True, slots=True)
class RunEpilogue:
    """Finish this backward: flush the last bucket, wait for reductions, keep this rank's part."""


@dataclass(frozen=True, slots=True)
class QueueCallback:
    """Have the autograd engine call `graph_completed` when graph task `graph_task_id` ends.

    `torch.autograd.Variable._execution_engine.queue_callback` does that for the graph task that
    is running in the calling thread, which is the one named here.

    Example:
        >>> QueueCallback(7).graph_task_id
        7
    """

    graph_task_id: int


@dataclass(frozen=True, slots=True)
class DropBackward:
    """Forget what an unfinished backward left in the buckets: it raised, and gets no epilogue.

    Only this rank may have raised, so running it must not start a collective.
    """


# Of the protocol. `model` is the number of a model on its axis, `unit` that of a unit of it.


@dataclass(frozen=True, slots=True)
class Post:
    """Say `message` to all ranks; nobody waits."""

    message: Message


@dataclass(frozen=True, slots=True)
class Read:
    """Wait until every rank has posted this round; it comes back as an `Answer`.

    Not `waits`: if some rank has not posted it yet, an answer of None comes back at once.
    """

    waits: bool = True


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchange values that can be pickled: an `Answer` has those of all ranks. A collective.

    A rank that takes part only gives None, and gets no answer.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise the error that all ranks have found in the same round.

    failed: the ranks that raised. Where there are none, the ranks make different calls.
    """

    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gather:
    """Start to gather a unit; rounded as autocast has it, unless it is `exact`. A collective."""

    model: int
    unit: int
    exact: bool


@dataclass(frozen=True, slots=True)
class TakePart:
    """Gather a unit for another rank, and drop it. A collective."""

    model: int
    unit: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a gather that was started."""

    model: int
    unit: int


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of the full values of a unit; wait for them if they are on the way."""

    model: int
    unit: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start to reduce the gradients of a unit, zeros where there are none. A collective.

    Not `mine`: another rank asked for it, and what this rank has of it stays here.
    """

    model: int
    unit: int
    mine: bool = True


@dataclass(frozen=True, slots=True)
class Look:
    """Look whether a reduction of the model would start at once, without a wait for one before.

    An `Answer` of () comes back if it would, else of None.
    """

    model: int


@dataclass(frozen=True, slots=True)
class WaitForReductions:
    """Wait for every reduction of every model: all ranks are at one place."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Take what this rank has reduced for passes of other ranks: they are over on every rank."""

    model: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the gradients of a model that no reduction has. Waits for nothing."""

    model: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Discard all that a backward has brought. Waits for what was started."""

    model: int


HookEffect = RunEpilogue | QueueCallback | DropBackward
HookEffects = tuple[HookEffect, ...]
ModelEffect = Gather | TakePart | Wait | Free | Reduce | Receive | Drop | Discard
Effect = ModelEffect | Post | Read | Exchange | Raise | Look | WaitForReductions


# `dataclasses.replace` for records of the protocol, which are made anew at each event.

R = TypeVar("R")


def replaced(record: R, **changes: Any) -> R:
    """Return a frozen record with other values of some fields.

    As `dataclasses.replace`, of a record without slots, and without its `__post_init__`: it takes a
    fifth of the time.

    Raises `TypeError` for a name that is no field.

    Example:
        >>> from fzero.state.schedule import Program
        >>> replaced(Program((0, 1)), events=(1,)).events
        (1,)
    """
    fields = record.__dict__
    new = object.__new__(type(record))
    values = new.__dict__
    values |= fields
    values |= changes
    if len(values) > len(fields):
        raise TypeError(f"{type(record).__name__} has no field {sorted(changes.keys() - fields)}")
    return new
