"""The hook machine under any events in any order: invariants, and a naive model of history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.errors import PhaseError
from fzero.state import hooks
from fzero.state.effects import HookEffects
from fzero.state.hooks import BackwardPhase, HookState
from tests.state.naive_hooks import NaiveHooks

TASKS = st.sampled_from([None, None, None, -1, 1, 2])
PLAIN = st.sampled_from(["exit", "exit", "reenter", "enter", "enter", "enter", "reset"])
EVENTS = st.one_of(
    st.tuples(PLAIN),
    st.tuples(st.just("hook"), st.integers(0, 3), TASKS),
    st.tuples(st.just("complete"), st.sampled_from([None, 1, 2])),
    st.tuples(st.just("queue"), TASKS),
)


class Both:
    """One record of hooks and its naive model; every event happens to both."""

    def __init__(self) -> None:
        self.state, self.model = HookState(), NaiveHooks()

    def happens(self, event: tuple[Any, ...]) -> None:
        """Call the method of the event's name, and compare."""
        getattr(self, event[0])(*event[1:])
        self.compare()

    def _check(self, answer: tuple[HookState, HookEffects], expected: HookEffects) -> None:
        self.state, effects = answer
        assert effects == expected

    def enter(self) -> None:
        self._check(hooks.enter_backward(self.state), self.model.happened("enter"))

    def exit(self) -> None:
        self._check(hooks.exit_backward(self.state), self.model.happened("exit"))

    def reenter(self) -> None:
        answer = hooks.reenter_backward_if_needed(self.state)
        self._check(answer, self.model.happened("reenter"))

    def reset(self) -> None:
        self._check(hooks.reset_for_new_step(self.state), self.model.happened("reset"))

    def queue(self, task: int | None) -> None:
        answer = hooks.queue_post_backward_callback(self.state, graph_task_id=task)
        self._check(answer, self.model.happened("queue", task=task))

    def complete(self, task: int | None) -> None:
        answer = hooks.graph_completed(self.state, graph_task_id=task)
        self._check(answer, self.model.happened("complete", task=task))

    def hook(self, expected: int, task: int | None) -> None:
        answer = hooks.update_hook_state_and_maybe_run_epilogue(
            self.state, expected=expected, graph_task_id=task
        )
        self._check(answer, self.model.happened("hook", expected=expected, task=task))

    def compare(self) -> None:
        """The record is legal, and shows what the history says."""
        state, model = self.state, self.model
        assert hooks.invariants(state) == []
        assert hooks.should_refresh_expected_hook_count(state) is model.should_refresh
        assert (
            state.backward_active_depth,
            state.hooks_fired_this_backward,
            state.max_expected_hooks_seen,
            state.remaining_grad_acc_hooks,
            state.backward_seen_this_step,
            state.epilogue_ran_this_backward,
            state.post_backward_callback_graph_task_id,
            state.hooks_outside_backward,
            state.unfinished,
        ) == (
            model.depth,
            len(model.hooks),
            model.most,
            model.remaining,
            model.seen,
            model.epilogue_ran,
            model.waiting,
            model.outside,
            model.unfinished,
        )


@settings(max_examples=40 * settings().max_examples)
@given(depth=st.sampled_from([0, 1, 1, 2]), events=st.lists(EVENTS, max_size=20))
def test_any_events_in_any_order_agree_with_the_history(
    depth: int, events: list[tuple[Any, ...]]
) -> None:
    """They begin inside a backward more often than not: else most would do nothing."""
    both = Both()
    for event in [("enter",)] * depth + events:
        both.happens(event)


ALPHABET = (
    *(("enter",), ("exit",), ("reenter",), ("reset",), ("queue", 1), ("complete", None)),
    *(("hook", 1, None), ("hook", 2, None), ("hook", 1, 1)),
)


def _every_sequence(both: Both, length: int) -> int:
    before, visited = both.state, 0
    for event in ALPHABET:
        both.happens(event)
        visited += 1 + (_every_sequence(both, length - 1) if length > 1 else 0)
        both.state = before
        both.model.history.pop()
    return visited


@pytest.mark.parametrize(
    "length", [4, pytest.param(6, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_every_short_sequence_agrees_with_the_history(length: int) -> None:
    assert _every_sequence(Both(), length) == sum(9**n for n in range(1, length + 1))


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "a counter is negative": {"phase": BackwardPhase.RUNNING, "backward_active_depth": -1},
    "graph task -1": {"phase": BackwardPhase.RUNNING, "post_backward_callback_graph_task_id": -1},
    "depth 1 with no backward running": {"backward_active_depth": 1},
    "an epilogue by count after 1 of 2 hooks": {
        "phase": BackwardPhase.REDUCED,
        "hooks_fired_this_backward": 1,
        "max_expected_hooks_seen": 2,
    },
    "a late hook among 1": {"phase": BackwardPhase.LATE, "hooks_fired_this_backward": 1},
}


@pytest.mark.parametrize("broken", IMPOSSIBLE)
def test_a_record_that_no_events_lead_to_is_refused(broken: str) -> None:
    with pytest.raises(PhaseError, match=rf"{broken}[\s\S]*Fix: start from HookState\(\)"):
        HookState(**IMPOSSIBLE[broken])
