"""The coordinator under random programs and random events, against a model of their whole log."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fzero.state import coordinator
from fzero.state.coordinator_effects import Drain, Gather, Prefetch, Release, Wait
from tests.state.coordinator_machine import Choices, Program, Shell, draw_world
from tests.state.coordinator_naive import World

PROGRAMS = st.binary(min_size=30, max_size=150)


def run(data: bytes) -> Shell:
    """Run the program that `data` says; Hypothesis shows the log of one that fails."""
    program = Program(Choices(data))
    try:
        return program.run()
    finally:
        note(f"{program.shell.world}\n{program.shell.log}")


@settings(max_examples=2_000)
@given(PROGRAMS)
def test_every_transition_of_a_program_is_what_its_whole_history_asks_for(data: bytes) -> None:
    shell = run(data)
    assert shell.warnings == shell.naive.warnings


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
@settings(max_examples=25_000, derandomize=False)
@given(data=PROGRAMS)
def test_every_transition_of_a_hundred_thousand_programs(part: int, data: bytes) -> None:
    del part  # four parts of other random programs each: workers share them
    shell = run(data)
    assert shell.warnings == shell.naive.warnings


@settings(max_examples=150)
@given(PROGRAMS)
def test_ranks_start_the_same_gathers_whenever_these_end(data: bytes) -> None:
    shell = run(data)
    early, late = (collectives(shell.world, shell.log, early=early) for early in (True, False))
    assert early == late


def collectives(world: World, log: Any, *, early: bool) -> list[Any]:
    """What a rank starts and frees, whose gathers end at once or only when they are awaited."""
    s, seen = world.coordinator(), []
    for what, *args in log:
        if what == "gathered" or what[0].isupper():  # these differ by rank
            continue
        s, effects = getattr(coordinator, what)(s, *args)
        seen.append(what)
        for effect in effects:
            if isinstance(effect, Gather | Prefetch):
                seen.append((type(effect).__name__, effect.ids))
            elif isinstance(effect, Wait):
                s, _ = coordinator.gathered(s, [unit for unit in effect.ids if unit in s.in_flight])
        freed = [u for effect in effects if isinstance(effect, Release | Drain) for u in effect.ids]
        seen.append(sorted(freed))
        if early:
            s, _ = coordinator.gathered(s, s.in_flight)
    return seen


class Events(RuleBasedStateMachine):
    """Any event at any time. The shell knows which of them must be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell(draw_world(Choices(b"")))

    @initialize(data=st.binary(min_size=22, max_size=22))
    def start(self, data: bytes) -> None:
        self.shell = Shell(draw_world(Choices(data)))

    def module(self, pick: int) -> int:
        return pick % len(self.shell.world.needs)

    def units(self, bits: int) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.shell.world.numels)) if bits >> i & 1)

    @rule(then=st.sampled_from(["begin_step", "end_step", "abort"]))
    def step(self, then: str) -> None:
        self.shell.send(then)
        if then != "begin_step":
            self.shell.check_clean()

    @rule(then=st.sampled_from(["begin_window", "end_window"]))
    def window(self, then: str) -> None:
        self.shell.send(then)

    @rule(picks=st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def whole_step(self, picks: list[int]) -> None:
        self.shell.send("end_step")
        self.shell.send("begin_step")
        for pick in [*picks, *reversed(picks)]:
            self.shell.send("fetch", self.module(pick))
            assert self.shell.use(self.module(pick))
            self.shell.send("release", self.module(pick))

    @rule(pick=st.integers(0, 4), event=st.sampled_from(["fetch", "release"]))
    def call(self, pick: int, event: str) -> None:
        self.shell.send(event, self.module(pick))
        self.shell.use(self.module(pick))

    @rule(bits=st.integers(0, 63), event=st.sampled_from(["hold", "let_go"]))
    def keep(self, bits: int, event: str) -> None:
        self.shell.send(event, self.units(bits))

    @rule(pick=st.integers(0, 4), bits=st.integers(0, 63))
    def foreign(self, pick: int, bits: int) -> None:
        self.shell.send("register_external", self.module(pick), self.units(bits))

    @rule(bits=st.integers(0, 63))
    def change(self, bits: int) -> None:
        self.shell.update(self.units(bits))

    @rule(bits=st.integers(0, 63))
    def arrive(self, bits: int) -> None:
        self.shell.arrive(self.units(bits))

    def teardown(self) -> None:
        self.shell.send("abort")
        self.shell.send("end_window")
        for ids in self.shell.state.held:
            self.shell.send("let_go", ids)
        self.shell.check_clean()
        assert set(self.shell.memory) <= self.shell.world.persistent


_MORE = 10 if os.environ.get("FZERO_HYPOTHESIS_PROFILE") == "nightly" else 1
Events.TestCase.settings = settings(max_examples=300 * _MORE, stateful_step_count=30)
TestEvents = Events.TestCase
