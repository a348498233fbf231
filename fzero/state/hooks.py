"""The gradient hooks of one model: when a backward is over, and its epilogue may run.

The autograd engine says little: that an output got its gradient (the adapter then calls
`enter_backward`), that a parameter got one (`update_hook_state_and_maybe_run_epilogue`), that a
graph task ended (`graph_completed`). A record of host integers and pure transitions turn that
into one epilogue for each outermost user backward. Two ways to know that a backward is over:

- **callback**: a hook comes with a `graph_task_id`. The first one (or the adapter, on entering)
  asks for a callback at the end of that graph task, and that callback alone decides. Reentrant
  checkpointing runs nested graph tasks inside the outermost one, which ends last. So the adapter
  queues in the graph task that gave the outputs their gradients, before any nested one.
- **counting**: `graph_task_id` is None (or -1, what torch says outside a backward). The epilogue
  comes with the hook that reaches the largest expected count. A phase of reentrant checkpointing
  that nobody has counted yet when the ones before are all there cannot be foreseen: the epilogue
  then runs after each such phase, and `reenter_backward_if_needed` opens the next.

A backward that a custom Function runs inside its forward fires hooks at depth 0: they change
none of the counters. Every transition takes any legal state and returns `(state, effects)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from fzero.errors import PhaseError
from fzero.state.effects import DropBackward, HookEffects, QueueCallback, RunEpilogue

# The record of a model's gradient hooks: host integers, and which combinations are legal.


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


def enter_backward(s: HookState) -> tuple[HookState, HookEffects]:
    """Begin a user backward: depth + 1, and at depth 0 a new outermost one with new counters.

    An outermost backward that was left unfinished raised on the way, so its gradients go
    (`DropBackward`) before those of this one come. Phases of one backward are no new backward:
    they come in by `reenter_backward_if_needed`.

    Example:
        >>> once, _ = enter_backward(HookState())
        >>> enter_backward(once)[0].backward_active_depth
        2
    """
    if s.backward_active_depth > 0:
        return replace(s, backward_active_depth=s.backward_active_depth + 1), ()
    begun = HookState(phase=BackwardPhase.RUNNING, backward_active_depth=1)
    return begun, _drop_if_unfinished(s)


def exit_backward(s: HookState) -> tuple[HookState, HookEffects]:
    """End a user backward: depth - 1, never below 0. A queued callback stays queued.

    It emits nothing: a `finally` may call it after an exception, where a collective would hang.

    Example:
        >>> exit_backward(HookState())[0].backward_active_depth
        0
    """
    return replace(s, backward_active_depth=max(s.backward_active_depth - 1, 0)), ()


def reset_for_new_step(s: HookState) -> tuple[HookState, HookEffects]:
    """Forget everything, the depth included: a forward begins, or a backward has raised.

    Emits `DropBackward` when that cuts a backward short. A forward that runs inside a backward
    (checkpointing recomputes) is no new step: the adapter must not reset there.

    Example:
        >>> state, _ = enter_backward(HookState())
        >>> state, effects = queue_post_backward_callback(state, graph_task_id=7)
        >>> reset_for_new_step(state) == (HookState(), (DropBackward(),))
        True
    """
    return HookState(), _drop_if_unfinished(s)


def should_refresh_expected_hook_count(s: HookState) -> bool:
    """Whether the next hook is the first of a backward or of a phase: count again for that one.

    Ask before `reenter_backward_if_needed`, which hides the boundary between phases. Hooks of a
    backward inside a forward are not counted; the first of a row gets True, the others False.

    Example:
        >>> should_refresh_expected_hook_count(enter_backward(HookState())[0])
        True
    """
    if s.hooks_outside_backward > 0:
        return False
    return s.hooks_fired_this_backward == 0 or _phase_ended(s)


def reenter_backward_if_needed(s: HookState) -> tuple[HookState, HookEffects]:
    """Open the next phase of a backward that was exited with no hook remaining: depth 0 -> 1.

    Counters and a queued callback are kept; the backward owes an epilogue (again). Nothing
    happens while a backward is open, when hooks remain, when none was seen since the reset, and
    after `graph_completed`: the end of the graph was the end of that backward, and a hook that
    comes then belongs to a backward inside a forward.

    Example:
        >>> state, _ = enter_backward(HookState())
        >>> for transition in (exit_backward, reenter_backward_if_needed):
        ...     state, _ = transition(state)
        >>> state.backward_active_depth
        1
    """
    if not _phase_ended(s) or s.phase is BackwardPhase.COMPLETE:
        return s, ()
    again = replace(
        s, phase=BackwardPhase.RUNNING, backward_active_depth=1, hooks_outside_backward=0
    )
    return again, ()


def queue_post_backward_callback(
    s: HookState, *, graph_task_id: int | None
) -> tuple[HookState, HookEffects]:
    """Ask for one callback at the end of graph task `graph_task_id`, once for each backward.

    Nothing happens when one is queued already, outside a backward, after the epilogue, and
    without the API (None, or -1: no graph task is running).

    Example:
        >>> state, _ = enter_backward(HookState())
        >>> state, effects = queue_post_backward_callback(state, graph_task_id=7)
        >>> effects
        (QueueCallback(graph_task_id=7),)
        >>> queue_post_backward_callback(state, graph_task_id=8)[1]
        ()
    """
    free = s.phase is BackwardPhase.RUNNING and not s.post_backward_callback_queued
    if graph_task_id is None or graph_task_id < 0 or s.backward_active_depth == 0 or not free:
        return s, ()
    queued = replace(s, post_backward_callback_graph_task_id=graph_task_id)
    return queued, (QueueCallback(graph_task_id),)


def graph_completed(
    s: HookState, *, graph_task_id: int | None = None
) -> tuple[HookState, HookEffects]:
    """The callback: the graph ended, and every backward in it. Depth 0, the epilogue is due.

    It runs whatever was announced: a graph that has ended fires no more hooks, and other ranks
    wait. Nothing happens when no callback is queued, or when the one queued is not that of
    `graph_task_id` (a reset came between); None takes it as that one.

    Example:
        >>> state, _ = enter_backward(HookState())
        >>> state, _ = queue_post_backward_callback(state, graph_task_id=7)
        >>> state, effects = graph_completed(state, graph_task_id=7)
        >>> effects, state.backward_active_depth, graph_completed(state)[1]
        ((RunEpilogue(),), 0, ())
    """
    queued = s.post_backward_callback_graph_task_id
    if queued is None or graph_task_id not in (None, queued):
        return s, ()
    done = replace(
        s,
        phase=BackwardPhase.COMPLETE,
        backward_active_depth=0,
        post_backward_callback_graph_task_id=None,
    )
    return done, (RunEpilogue(),)


def update_hook_state_and_maybe_run_epilogue(
    s: HookState, *, expected: int, graph_task_id: int | None
) -> tuple[HookState, HookEffects]:
    """A gradient hook fired: fired + 1, max(expected), and when counting the epilogue if due.

    `expected` is the number of hooks of this backward as far as known now, those that fired
    included: `hooks_fired_this_backward` + those the running graph task will fire. Only its
    largest value counts, so between boundaries `max_expected_hooks_seen` does.

    At depth 0 the hook is one of a backward inside a forward: noted, not counted. After an
    epilogue by count, and with no exit and re-entry since, it is counted and gets no second
    epilogue (`unfinished` says so).

    Example:
        >>> state, _ = enter_backward(HookState())
        >>> state, effects = update_hook_state_and_maybe_run_epilogue(
        ...     state, expected=1, graph_task_id=7
        ... )
        >>> effects, graph_completed(state)[1]
        ((QueueCallback(graph_task_id=7),), (RunEpilogue(),))
    """
    if s.backward_active_depth == 0:
        return replace(s, hooks_outside_backward=s.hooks_outside_backward + 1), ()
    s, effects = queue_post_backward_callback(s, graph_task_id=graph_task_id)
    fired = s.hooks_fired_this_backward + 1
    most = max(s.max_expected_hooks_seen, expected)
    phase = s.phase
    if phase is not BackwardPhase.RUNNING:
        phase = BackwardPhase.LATE
    elif fired >= most and not s.post_backward_callback_queued:
        phase, effects = BackwardPhase.REDUCED, (RunEpilogue(),)
    counted = HookState(  # by hand: replace() costs more than all of the above, for each hook
        phase=phase,
        backward_active_depth=s.backward_active_depth,
        hooks_fired_this_backward=fired,
        max_expected_hooks_seen=most,
        post_backward_callback_graph_task_id=s.post_backward_callback_graph_task_id,
    )
    return counted, effects


def count_hooks(s: HookState, *, fired: int) -> tuple[HookState, HookEffects]:
    """Count `fired` gradient hooks more, of the graph task whose callback is queued.

    Each of them would change the counts and nothing else: the callback alone decides. So whoever
    keeps the record may count them all at once, when somebody reads it.

    Raises `PhaseError` if no callback is queued.

    Example:
        >>> state, _ = enter_backward(HookState())
        >>> state, _ = queue_post_backward_callback(state, graph_task_id=7)
        >>> count_hooks(state, fired=3)[0].hooks_fired_this_backward
        3
    """
    if not s.post_backward_callback_queued:
        raise PhaseError(
            f"{fired} hooks are counted at once, and no callback is queued.",
            cause="hooks of a backward whose end is found by counting.",
            fix="use update_hook_state_and_maybe_run_epilogue for each of them.",
        )
    count = s.hooks_fired_this_backward + fired
    most = max(s.max_expected_hooks_seen, count)
    return replace(s, hooks_fired_this_backward=count, max_expected_hooks_seen=most), ()


def _phase_ended(s: HookState) -> bool:
    # Whether a backward was seen, is exited, and no hook of it is outstanding.
    outstanding = s.remaining_grad_acc_hooks > 0 or s.backward_active_depth > 0
    return s.backward_seen_this_step and not outstanding


def _drop_if_unfinished(s: HookState) -> HookEffects:
    # What a late hook brought is a gradient like any other: the next epilogue takes it along.
    given_up = s.unfinished and s.phase is BackwardPhase.RUNNING
    return (DropBackward(),) if given_up else ()
