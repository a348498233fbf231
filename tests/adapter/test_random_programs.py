"""Random programs on real ranks, at every stage, against a model that keeps a list of gradients."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.adapter.on_ranks import each_stage
from tests.adapter.random_programs import EVENTS, FORWARDS, draw_program, run_programs
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

FOUND = (10186, 20630, 30230, 40015)
"""A program of each stage that an engine did not run as the model once."""


@each_stage
def test_any_program_gives_the_gradients_and_updates_of_the_naive_model(stage: int) -> None:
    seeds = [*range(stage, 100, 4), FOUND[stage]]
    assert run_ranks(run_programs, 2, stage, seeds, timeout_s=100) == [26, 26]


@pytest.mark.parametrize("stage", [0, 3])
def test_any_program_gives_the_same_on_one_rank_and_on_three(stage: int) -> None:
    run_ranks(run_programs, 1, stage, range(1000, 1015), timeout_s=100)
    run_ranks(run_programs, 3, stage, range(2000, 2008), timeout_s=100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@each_stage
def test_thousands_of_programs_give_the_gradients_of_the_naive_model(stage: int) -> None:
    seeds = range(10_000 * (stage + 1), 10_000 * (stage + 1) + 2000)
    run_ranks(run_programs, 2, stage, seeds, timeout_s=1100)


def test_the_programs_have_every_event_and_every_kind_of_forward() -> None:
    events = [event for seed in range(100) for event in draw_program(seed).events]
    seen = Counter(event.what for event in events)
    assert seen.keys() == EVENTS.keys() and min(seen.values()) >= 15
    assert {event.how for event in events if event.what == "forward"} == set(FORWARDS)
    assert draw_program(5) == draw_program(5) != draw_program(6)
