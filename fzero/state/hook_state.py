"""The record of a model's gradient hooks: host integers, and which combinations are legal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fzero.errors import PhaseError


class BackwardPhase(Enum):
    """Where the latest outermost backward since the last reset stands."""

    IDLE = "idle"  # there was none; left by enter, come back to by reset
    RUNNING = "running"  # begun, epilogue to come; entered by enter and by re-entry
    REDUCED = "reduced"  # counting: all expected hooks came, the epilogue ran
    LATE = "late"  # counting: a hook came after that epilogue, before an exit and a re-entry
    COMPLETE = "complete"  # callback: its graph ended, the epilogue ran; only an enter goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class HookState:
    """Gradient hooks of one model, as host integers: `==` and `hash` are exact.

    Counters belong to one outermost backward: an enter at depth 0 starts them again, as a reset
    does. Raises `PhaseError` when made by hand with values that no sequence of events leads to.

    Example:
        >>> state = HookState(
        ...     phase=BackwardPhase.RUNNING,
        ...     backward_active_depth=1,
        ...     hooks_fired_this_backward=1,
        ...     max_expected_hooks_seen=3,
        ... )
        >>> state.remaining_grad_acc_hooks, state.backward_seen_this_step
        (2, True)
    """

    phase: BackwardPhase = BackwardPhase.IDLE
    backward_active_depth: int = 0  # user backwards open now; 0 again when a graph completes
    hooks_fired_this_backward: int = 0
    max_expected_hooks_seen: int = 0
    post_backward_callback_graph_task_id: int | None = None  # None: no callback is queued
    hooks_outside_backward: int = 0  # hooks at depth 0 since the last enter, re-entry or reset

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if broken := invariants(self):
            raise PhaseError(
                "HookState: " + "; ".join(broken) + ".",
                cause="a record was made by hand, or restored from something else.",
                fix="start from HookState() and go on with the transitions of fzero.state.hooks.",
            )

    @property
    def remaining_grad_acc_hooks(self) -> int:
        """Hooks announced and not yet fired; 0 once the graph ended, whatever was announced."""
        if self.phase is BackwardPhase.COMPLETE:
            return 0
        return max(self.max_expected_hooks_seen - self.hooks_fired_this_backward, 0)

    @property
    def backward_seen_this_step(self) -> bool:
        """Whether a backward was entered since the last reset."""
        return self.phase is not BackwardPhase.IDLE

    @property
    def epilogue_ran_this_backward(self) -> bool:
        """Whether the latest backward has had its epilogue; a re-entry makes it owe one again."""
        return self.phase not in (BackwardPhase.IDLE, BackwardPhase.RUNNING)

    @property
    def post_backward_callback_queued(self) -> bool:
        """Whether a callback is queued whose graph has not ended."""
        return self.post_backward_callback_graph_task_id is not None

    @property
    def unfinished(self) -> bool:
        """Whether hooks fired, or a callback waits, that no epilogue has answered.

        True while a backward runs. True between backwards means that one raised, or that the
        counting missed a hook: an update made now would miss gradients.
        """
        begun = self.hooks_fired_this_backward > 0 or self.post_backward_callback_queued
        return begun and self.phase in (BackwardPhase.RUNNING, BackwardPhase.LATE)


def invariants(s: HookState) -> list[str]:
    """Say what is wrong with `s`, one line for each broken rule; nothing for a legal record.

    Example:
        >>> invariants(HookState())
        []
    """
    depth, fired = s.backward_active_depth, s.hooks_fired_this_backward
    most, task = s.max_expected_hooks_seen, s.post_backward_callback_graph_task_id
    outside, phase = s.hooks_outside_backward, s.phase
    broken: list[str] = []
    if depth < 0 or fired < 0 or most < 0 or outside < 0:
        broken.append("a counter is negative")
    if depth > 0 and outside > 0:
        broken.append(f"{outside} hooks outside a backward at depth {depth}")
    if fired == 0 and most > 0:
        broken.append(f"{most} hooks expected, and none has fired")
    if phase is BackwardPhase.RUNNING:  # the rules below are for the others
        return broken if task is None or task >= 0 else [*broken, f"graph task {task}"]
    if task is not None:
        broken.append(f"a callback queued with no epilogue to come ({phase.value})")
    if depth > 0 and phase in (BackwardPhase.IDLE, BackwardPhase.COMPLETE):
        broken.append(f"depth {depth} with no backward running ({phase.value})")
    if phase is BackwardPhase.IDLE and fired > 0:
        broken.append(f"{fired} hooks fired in no backward")
    if phase is BackwardPhase.REDUCED and fired < max(most, 1):
        broken.append(f"an epilogue by count after {fired} of {most} hooks")
    if phase is BackwardPhase.LATE and fired < 2:
        broken.append(f"a late hook among {fired}")
    return broken
