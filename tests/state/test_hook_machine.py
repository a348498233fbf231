"""The hook machine under any events in any order: invariants, and a naive model of history."""

from __future__ import annotations

from random import Random, SystemRandom
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fzero.errors import PhaseError
from fzero.state import hooks
from fzero.state.effects import HookEffects
from fzero.state.hooks import HookState
from tests.state.naive_hooks import NaiveHooks

TASKS_LISTED = [None, None, None, -1, 1, 2]
TASKS = st.sampled_from(TASKS_LISTED)
COUNTS = st.integers(0, 3)
ENGINES = [0, 0, 1, 2]
DEPTHS = [1, 1, 0, 2]
COMPLETE = [("complete", None), ("complete", 1), ("complete", 2), ("queue", 1)]
PLAIN = ["exit", "exit", "reenter", "enter", "enter", "enter", "reset"]
EVENTS = st.one_of(
    st.sampled_from(PLAIN).map(lambda name: (name,)),
    st.tuples(st.just("hook"), COUNTS, TASKS),
    st.tuples(st.just("phase"), st.integers(1, 4), COUNTS, TASKS),
    st.sampled_from(COMPLETE),
    st.tuples(st.sampled_from(["queue", "refused"]), TASKS),
)


class HookMachine(RuleBasedStateMachine):
    """Three engines: each event happens to one of them, in its record and in its naive model.

    Hypothesis leaves out rules, and a sequence that never enters says little. Hence one rule with
    all events, and engines that begin inside a backward as often as not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states = [HookState()] * 3
        self.models = [NaiveHooks() for _ in range(3)]
        self.touched = 0

    @initialize(depths=st.tuples(*[st.sampled_from(DEPTHS)] * 3))
    def begin(self, depths: tuple[int, ...]) -> None:
        for self.touched, depth in enumerate(depths):
            for _ in range(depth):
                self.enter()

    @rule(at=st.sampled_from(ENGINES), event=EVENTS)
    def happens(self, at: int, event: tuple[Any, ...]) -> None:
        self.touched = at
        getattr(self, event[0])(*event[1:])

    def _check(self, answer: tuple[HookState, HookEffects], expected: HookEffects) -> None:
        self.states[self.touched], effects = answer
        assert effects == expected

    @property
    def state(self) -> HookState:
        return self.states[self.touched]

    @property
    def model(self) -> NaiveHooks:
        return self.models[self.touched]

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

    def phase(self, fires: int, announced: int, task: int | None) -> None:
        """Hooks as an adapter handles them: refresh, re-enter, update."""
        counted = 0
        for _ in range(fires):
            expected = self.state.max_expected_hooks_seen
            if hooks.should_refresh_expected_hook_count(self.state):
                counted += 1
                expected = self.state.hooks_fired_this_backward + announced
            self.reenter()
            self.hook(expected, task)
        assert counted <= 1, "the expected count was taken twice in one row of hooks"

    def refused(self, task: int | None) -> None:
        before = repr(self.state)
        with pytest.raises(PhaseError, match="expects -1 hooks"):
            hooks.update_hook_state_and_maybe_run_epilogue(
                self.state, expected=-1, graph_task_id=task
            )
        assert repr(self.state) == before

    @invariant()
    def the_record_is_legal_and_shows_what_the_history_says(self) -> None:
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
        ) == (
            model.depth,
            len(model.hooks),
            model.most,
            model.remaining,
            model.seen,
            model.epilogue_ran,
            model.waiting,
            model.outside,
        )


def _machine(max_examples: int, *, derandomize: bool) -> None:
    limits = settings(
        max_examples=max_examples, stateful_step_count=20, derandomize=derandomize, database=None
    )
    run_state_machine_as_test(HookMachine, settings=limits)


def test_any_events_in_any_order_agree_with_the_history() -> None:
    _machine(2_000, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_sequences_that_hypothesis_draws_agree_with_the_history() -> None:
    _machine(10_000, derandomize=False)


def _draw(random: Random) -> tuple[Any, ...]:
    """One event, with the weights of EVENTS."""
    task = random.choice(TASKS_LISTED)
    name = random.choice(
        ["plain", "hook", "phase", "complete", random.choice(["queue", "refused"])]
    )
    if name == "plain":
        return (random.choice(PLAIN),)
    if name == "hook":
        return name, random.randint(0, 3), task
    if name == "phase":
        return name, random.randint(1, 4), random.randint(0, 3), task
    return random.choice(COMPLETE) if name == "complete" else (name, task)


def _sequence(seed: str) -> None:
    """One sequence on three engines; a failure shows the seed and the events."""
    random, machine, events = Random(seed), HookMachine(), []
    try:
        machine.begin(tuple(random.choice(DEPTHS) for _ in range(3)))
        for _ in range(random.randint(4, 20)):
            events.append((random.choice(ENGINES), _draw(random)))
            machine.happens(*events[-1])
            machine.the_record_is_legal_and_shows_what_the_history_says()
    except BaseException as error:
        error.add_note(f"_sequence({seed!r}): {events}")
        raise


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
def test_a_hundred_thousand_sequences_agree_with_the_history(part: int) -> None:
    """Without Hypothesis, which takes three times as long and is there to shrink what fails."""
    run = SystemRandom().getrandbits(32)  # other sequences each night
    for number in range(25_000):
        _sequence(f"{run}-{part}-{number}")


ALPHABET = (
    *(("enter",), ("exit",), ("reenter",), ("reset",), ("queue", 1), ("complete", None)),
    *(("hook", 1, None), ("hook", 2, None), ("hook", 1, 1)),
)


def _every_sequence(machine: HookMachine, length: int) -> int:
    before, visited = machine.state, 0
    for event in ALPHABET:
        machine.happens(at=0, event=event)
        machine.the_record_is_legal_and_shows_what_the_history_says()
        visited += 1 + (_every_sequence(machine, length - 1) if length > 1 else 0)
        machine.states[0] = before
        machine.model.history.pop()
    return visited


def test_every_sequence_of_four_events_agrees_with_the_history() -> None:
    assert _every_sequence(HookMachine(), 4) == 9 + 9**2 + 9**3 + 9**4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sequence_of_six_events_agrees_with_the_history() -> None:
    assert _every_sequence(HookMachine(), 6) == sum(9**n for n in range(1, 7))
