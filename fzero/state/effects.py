"""What a transition asks for: a closed set of records, data and nothing else.

Who made the transition (the engine's events, the pass, the sequencer) matches on the type and does
what is asked; a test compares with `==`. Nothing here holds a tensor, a stream or a callable.
"""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class GatherUnit:
    """Start to gather the parameters of a unit. A collective."""

    unit: int


@dataclass(frozen=True, slots=True)
class FreeUnit:
    """Let go of the full values of a unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class ReduceUnit:
    """Start to reduce the gradients of a unit, zeros where there are none. A collective."""

    unit: int


@dataclass(frozen=True, slots=True)
class AnnouncePhase:
    """Tell the other ranks that a forward (0) or a backward (1) begins. A round of all ranks."""

    phase: int


@dataclass(frozen=True, slots=True)
class EndPhase:
    """Wait until no rank is in the phase any more, and take part in what they need till then."""


HookEffect = RunEpilogue | QueueCallback | DropBackward
HookEffects = tuple[HookEffect, ...]
ReplayEffect = GatherUnit | FreeUnit | ReduceUnit
PassEffect = AnnouncePhase | EndPhase
