"""The hook machine, row by row: what DeepSpeed's map calls B1 to B11, and where fzero differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fzero.errors import PhaseError
from fzero.state import hooks
from fzero.state.effects import DropBackward, HookEffects, QueueCallback, RunEpilogue
from fzero.state.hooks import BackwardPhase, HookState

Transition = Callable[[HookState], tuple[HookState, HookEffects]]

ENTER, EXIT = hooks.enter_backward, hooks.exit_backward
RESET, REENTER = hooks.reset_for_new_step, hooks.reenter_backward_if_needed
END = hooks.graph_completed
RUN, DROP = (RunEpilogue(),), (DropBackward(),)


def queue(task: int | None) -> Transition:
    return partial(hooks.queue_post_backward_callback, graph_task_id=task)


def hook(expected: int, task: int | None = None) -> Transition:
    update = hooks.update_hook_state_and_maybe_run_epilogue
    return partial(update, expected=expected, graph_task_id=task)


def end(task: int) -> Transition:
    return partial(hooks.graph_completed, graph_task_id=task)


def play(*transitions: Transition) -> tuple[HookState, list[HookEffects]]:
    state, answers = HookState(), []
    for transition in transitions:
        state, effects = transition(state)
        answers.append(effects)
    return state, answers


ONE, TWO = (hook(1),), (hook(2), hook(2))  # a whole backward by count, of one hook and of two
DONE = (ENTER, queue(7), hook(1, 7), END)  # a whole backward by callback
SHOWN = (
    "remaining_grad_acc_hooks",
    "backward_active_depth",
    "backward_seen_this_step",
    "epilogue_ran_this_backward",
    "hooks_fired_this_backward",
    "max_expected_hooks_seen",
    "post_backward_callback_queued",
    "post_backward_callback_graph_task_id",
)
NEW = (0, 0, False, False, 0, 0, False, None)
ENTERED = (0, 1, True, False, 0, 0, False, None)
ENDED = (0, 0, True, True, 1, 1, False, None)

# What happened; what the last of it asks for; what the record then shows.
ROWS: dict[str, tuple[tuple[Transition, ...], HookEffects, tuple[Any, ...]]] = {
    "B1 the first enter begins": ((ENTER,), (), ENTERED),
    "B1 an enter inside counts on": (
        (ENTER, hook(3), ENTER, hook(3)),
        (),
        (1, 2, True, False, 2, 3, False, None),
    ),
    "B1 the next outermost enter begins again": ((ENTER, *TWO, EXIT, ENTER), (), ENTERED),
    "B2 an exit goes down one level": ((ENTER, ENTER, EXIT), (), ENTERED),
    "B2 an exit never goes below 0": ((EXIT, EXIT), (), NEW),
    "B2 an exit keeps the callback": (
        (ENTER, queue(7), EXIT),
        (),
        (0, 0, True, False, 0, 0, True, 7),
    ),
    "B3 a reset forgets a finished backward": ((ENTER, *TWO, EXIT, RESET), (), NEW),
    "B3, B11 a reset forgets the depth too": ((ENTER, ENTER, RESET), (), NEW),
    "B3 a reset drops what hooks brought": ((ENTER, hook(3), RESET), DROP, NEW),
    "B3 a reset drops what waits for a callback": ((ENTER, queue(7), EXIT, RESET), DROP, NEW),
    "B3 an enter drops what raised": ((ENTER, hook(3), EXIT, ENTER), DROP, ENTERED),
    "B3 an enter keeps what a late hook brought": (
        (ENTER, *ONE, hook(1), EXIT, ENTER),
        (),
        ENTERED,
    ),
    "B5 a phase is re-entered, counters kept": (
        (ENTER, *TWO, EXIT, REENTER),
        (),
        (0, 1, True, False, 2, 2, False, None),
    ),
    "B5 a phase is re-entered before the graph ends": (
        (ENTER, hook(1, 7), EXIT, REENTER),
        (),
        (0, 1, True, False, 1, 1, True, 7),
    ),
    "B5 no re-entry with hooks outstanding": (
        (ENTER, hook(3), EXIT, REENTER),
        (),
        (2, 0, True, False, 1, 3, False, None),
    ),
    "B5 no re-entry at depth 1": ((ENTER, REENTER), (), ENTERED),
    "B5 no re-entry with nothing seen": ((REENTER,), (), NEW),
    "B5, B9 no re-entry after the graph ended": ((*DONE, REENTER), (), ENDED),
    "B6 a callback is queued": (
        (ENTER, queue(7)),
        (QueueCallback(7),),
        (0, 1, True, False, 0, 0, True, 7),
    ),
    "B6 it is queued once": ((ENTER, queue(7), queue(8)), (), (0, 1, True, False, 0, 0, True, 7)),
    "B6 not at depth 0": ((queue(7),), (), NEW),
    "B6 not after an exit": ((ENTER, EXIT, queue(7)), (), (0, 0, True, False, 0, 0, False, None)),
    "B6 not without the API": ((ENTER, queue(None)), (), ENTERED),
    "B6 not outside a graph task": ((ENTER, queue(-1)), (), ENTERED),
    "B6 not after an epilogue by count": (
        (ENTER, *ONE, queue(7)),
        (),
        (0, 1, True, True, 1, 1, False, None),
    ),
    "B7 the end of the graph clears the queue": (DONE, RUN, ENDED),
    "B7 a second backward has its own callback": (
        (*DONE, ENTER, hook(1, 9)),
        (QueueCallback(9),),
        (0, 1, True, False, 1, 1, True, 9),
    ),
    "B7 and its own epilogue": ((*DONE, ENTER, hook(1, 9), END), RUN, ENDED),
    "B7 a graph ends once": ((*DONE, END), (), ENDED),
    "B7 a graph that nobody asked about": ((ENTER, END), (), ENTERED),
    "B7 a graph from before a reset": (
        (ENTER, queue(7), RESET, ENTER, queue(9), end(7)),
        (),
        (0, 1, True, False, 0, 0, True, 9),
    ),
    "B8 the first hook asks for the callback": (
        (ENTER, hook(3, 7)),
        (QueueCallback(7),),
        (2, 1, True, False, 1, 3, True, 7),
    ),
    "B8 with a callback a hook runs nothing": (
        (ENTER, hook(1, 7), hook(1, 8)),
        (),
        (0, 1, True, False, 2, 1, True, 7),
    ),
    "B8 the end of the graph runs it, hooks or none": (
        (ENTER, queue(7), END),
        RUN,
        (0, 0, True, True, 0, 0, False, None),
    ),
    "B8 and when a counted hook has not fired": (
        (ENTER, hook(3, 7), END),
        RUN,
        (0, 0, True, True, 1, 3, False, None),
    ),
    "B8 and after an early exit": ((ENTER, hook(1, 7), EXIT, END), RUN, ENDED),
    "B8 counting: not before the last": (
        (ENTER, hook(2)),
        (),
        (1, 1, True, False, 1, 2, False, None),
    ),
    "B8 counting: with the last": ((ENTER, *TWO), RUN, (0, 1, True, True, 2, 2, False, None)),
    "B8 counting: the largest count, as it grows": (
        (ENTER, hook(2), hook(4), hook(2), hook(1)),
        RUN,
        (0, 1, True, True, 4, 4, False, None),
    ),
    "B8 counting: a late hook has no second epilogue": (
        (ENTER, *ONE, hook(3)),
        (),
        (1, 1, True, True, 2, 3, False, None),
    ),
    "B8 counting: at the end of each phase": (
        (ENTER, *TWO, EXIT, REENTER, hook(4), hook(4)),
        RUN,
        (0, 1, True, True, 4, 4, False, None),
    ),
    "B9 a backward inside a forward": ((RESET, hook(1), hook(1)), (), NEW),
    "B9 the same, with callbacks": ((RESET, hook(1, 7)), (), NEW),
    "B9 it leaves nothing to the user's backward": (
        (RESET, hook(5), hook(5), ENTER, *TWO),
        RUN,
        (0, 1, True, True, 2, 2, False, None),
    ),
    "B11 two forwards, one backward, callback": (
        (RESET, RESET, ENTER, ENTER, hook(1, 7), END),
        RUN,
        ENDED,
    ),
    "B11 the exit after it changes nothing": ((*DONE, EXIT), (), ENDED),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_behaviour(name: str) -> None:
    events, effects, shown = ROWS[name]
    state, answers = play(*events)
    assert answers[-1] == effects
    assert tuple(getattr(state, field) for field in SHOWN) == shown
    assert hooks.invariants(state) == []


REFRESH: dict[str, tuple[tuple[Transition, ...], bool]] = {
    "B4 before any hook": ((), True),
    "B4 before the first hook of a backward": ((ENTER,), True),
    "B4 not before the second": ((ENTER, hook(2)), False),
    "B4 not within a phase, counted or not": ((ENTER, hook(1, 7)), False),
    "B4 at the next phase": ((ENTER, *ONE, EXIT), True),
    "B4 at the next phase, callback": ((ENTER, hook(1, 7), EXIT), True),
    "B4 not after the re-entry": ((ENTER, *ONE, EXIT, REENTER), False),
    "B4 not with hooks outstanding": ((ENTER, hook(2), EXIT), False),
    "B10 once for a backward inside a forward": ((RESET, hook(2)), False),
    "B10 then for the user's": ((RESET, hook(2), ENTER), True),
    "B10 for a second backward": ((*DONE, ENTER), True),
}


@pytest.mark.parametrize("name", REFRESH)
def test_the_expected_count_is_taken_at_boundaries(name: str) -> None:
    events, refresh = REFRESH[name]
    assert hooks.should_refresh_expected_hook_count(play(*events)[0]) is refresh


def test_b10_a_backward_of_many_hooks_counts_once() -> None:
    for task in (None, 7):
        state, counted = play(ENTER)[0], 0
        for _ in range(50):
            counted += hooks.should_refresh_expected_hook_count(state)
            state, _ = hook(50, task)(state)
        assert counted == 1


UNFINISHED: dict[str, tuple[tuple[Transition, ...], bool]] = {
    "nothing began": ((RESET,), False),
    "a backward that touched nothing": ((ENTER, EXIT), False),
    "a backward runs": ((ENTER, hook(2)), True),
    "a backward raised, by count": ((ENTER, hook(2), EXIT), True),
    "a backward raised, by callback": ((ENTER, queue(7), EXIT), True),
    "an epilogue, then a late hook": ((ENTER, *ONE, hook(1), EXIT), True),
    "a finished backward, by count": ((ENTER, *ONE), False),
    "a finished backward, by callback": (DONE, False),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_unfinished_says_that_gradients_wait(name: str) -> None:
    events, unfinished = UNFINISHED[name]
    assert play(*events)[0].unfinished is unfinished


RUNNING, IDLE = BackwardPhase.RUNNING, BackwardPhase.IDLE
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "a counter is negative": {"phase": RUNNING, "backward_active_depth": -1},
    "2 hooks outside a backward at depth 1": {
        "phase": RUNNING,
        "backward_active_depth": 1,
        "hooks_outside_backward": 2,
    },
    "3 hooks expected, and none has fired": {"phase": RUNNING, "max_expected_hooks_seen": 3},
    "graph task -1": {"phase": RUNNING, "post_backward_callback_graph_task_id": -1},
    "no epilogue to come": {"phase": IDLE, "post_backward_callback_graph_task_id": 1},
    "depth 1 with no backward running": {"phase": IDLE, "backward_active_depth": 1},
    "1 hooks fired in no backward": {"phase": IDLE, "hooks_fired_this_backward": 1},
    "an epilogue by count after 1 of 2 hooks": {
        "phase": BackwardPhase.REDUCED,
        "hooks_fired_this_backward": 1,
        "max_expected_hooks_seen": 2,
    },
    "a late hook among 1": {"phase": BackwardPhase.LATE, "hooks_fired_this_backward": 1},
}


@pytest.mark.parametrize("broken", IMPOSSIBLE)
def test_a_record_that_no_events_lead_to_is_refused(broken: str) -> None:
    with pytest.raises(PhaseError, match=broken) as raised:
        HookState(**IMPOSSIBLE[broken])
    assert "Fix: start from HookState()" in str(raised.value)


def test_a_refused_hook_leaves_the_state() -> None:
    state, _ = play(ENTER, hook(2))
    with pytest.raises(PhaseError, match="expects -1 hooks in all") as raised:
        hook(-1)(state)
    assert "Fix: count inside the hook" in str(raised.value)
    assert hook(2)(state)[1] == RUN
