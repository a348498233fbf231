"""The laws of plans: what is gathered when, how much is whole at once, and unions of programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.state.schedule import (
    Limits,
    PlannedProgram,
    Program,
    Schedule,
    expected,
    plan_program,
    union,
    with_program,
)

UNITS = 6
units = st.integers(0, UNITS - 1)
events = st.lists(units | units.map(lambda u: ~u), max_size=14).map(tuple)


class Case(NamedTuple):
    """A program and the plan that is made of it."""

    events: tuple[int, ...]
    numels: tuple[int, ...]
    held: frozenset[int]
    plan: PlannedProgram

    def live_sets(self) -> list[set[int]]:
        """The units that are whole, or on the way, while each step of the plan runs."""
        live: set[int] = set()
        found = []
        for step in self.plan.steps:
            assert live.issuperset(step.frees), "freed before it was gathered"
            live -= {*step.frees}
            starts = [*step.gathers, *step.ahead]
            assert live.isdisjoint(starts) and len({*starts}) == len(starts), "gathered twice"
            live |= {*starts}
            found.append(set(live))
        return found


@st.composite
def cases(
    draw: st.DrawFn, prefetch_numels: Sequence[int] = (0, 1, 5, 12, 1000), keeps: bool | None = None
) -> Case:
    """A case within some limits; `keeps` is drawn where it is None."""
    limits = Limits(
        prefetch_numel=draw(st.sampled_from(prefetch_numels)),
        keeps=draw(st.booleans()) if keeps is None else keeps,
    )
    program = draw(events)
    numels = tuple(draw(st.lists(st.integers(1, 9), min_size=UNITS, max_size=UNITS)))
    held = draw(st.frozensets(units, max_size=3))
    return Case(program, numels, held, plan_program(Program(program), numels, held, limits))


@given(case=cases())
def test_every_use_finds_its_unit_whole_and_every_reduction_stays_behind_its_use(
    case: Case,
) -> None:
    steps = case.plan.steps
    for step, live in zip(steps[1:], case.live_sets()[1:], strict=True):
        assert step.unit in live | case.held
        assert case.held.isdisjoint(live)
    flat = [event for step in steps for event in (step.unit, *(~unit for unit in step.reduces))]
    assert flat == [-1, *case.events]


@given(case=cases(prefetch_numels=(0, 1), keeps=False))
def test_at_most_two_units_are_whole_at_once(case: Case) -> None:
    """The one in use, and the next: gathered early, or still there."""
    assert all(len(live) <= 2 for live in case.live_sets())


@given(data=st.data(), prefetch_numel=st.integers(2, 30))
def test_what_is_gathered_early_fits_the_limit(data: st.DataObject, prefetch_numel: int) -> None:
    """But for the next unit, which comes early whatever its size, and what it found there."""
    case = data.draw(cases(prefetch_numels=(prefetch_numel,), keeps=False))
    for step, live in zip(case.plan.steps, case.live_sets(), strict=True):
        waiting = live - {step.unit}
        if step.ahead and len(waiting) > 1:
            assert sum(case.numels[unit] for unit in waiting) <= prefetch_numel


@given(case=cases(prefetch_numels=(Limits().prefetch_numel,), keeps=False))
def test_the_next_use_is_gathered_one_use_before(case: Case) -> None:
    steps, sets = case.plan.steps, case.live_sets()
    for before, live, step in zip(steps[1:], sets[1:], steps[2:], strict=False):
        assert step.unit in live | case.held or before.unit == step.unit


@given(case=cases(keeps=True))
def test_what_is_kept_is_gathered_once(case: Case) -> None:
    starts = [unit for step in case.plan.steps for unit in (*step.gathers, *step.ahead)]
    assert sorted(starts) == sorted({event for event in case.events if event >= 0} - case.held)
    assert not any(step.frees for step in case.plan.steps)


@given(case=cases(), reads=st.lists(units, max_size=6))
def test_whatever_a_rank_reads_the_collectives_have_one_order(case: Case, reads: list[int]) -> None:
    """A rank goes on to the next use of what it reads, and at the end to the last step."""
    steps = case.plan.steps
    at, passed = 0, [steps[0]]
    for unit in reads:
        place = case.plan.next_use(unit, at)
        assert place is None or (place > at and steps[place].unit == unit)
        if place is None:
            assert unit not in [step.unit for step in steps[at + 1 :]]
            continue
        passed += steps[at + 1 : place + 1]
        at = place
    assert (*passed, *steps[at + 1 :]) == steps


def is_part(part: Sequence[int], whole: Sequence[int]) -> bool:
    rest = iter(whole)
    return all(event in rest for event in part)


@given(programs=st.lists(events, max_size=4))
def test_a_union_has_each_program_in_its_order(programs: list[tuple[int, ...]]) -> None:
    whole = union(programs).events
    assert all(is_part(program, whole) for program in programs)
    assert len(whole) <= sum(map(len, programs))
    assert {*whole} == {event for program in programs for event in program}


@given(program=events, count=st.integers(1, 4))
def test_a_union_of_equal_programs_is_that_program(program: tuple[int, ...], count: int) -> None:
    assert union([program] * count) == Program(program)


@given(
    recorded=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), events), max_size=6),
    index=st.integers(0, 5),
    phase=st.integers(0, 1),
)
def test_a_pass_is_expected_to_be_the_last_one_known(
    recorded: list[tuple[int, int, tuple[int, ...]]], index: int, phase: int
) -> None:
    schedule, known = Schedule(), {}
    for at, which, program in recorded:
        schedule = with_program(schedule, at, which, Program(program))
        known[at, which] = Program(program)
    places = [at for at, which in known if which == phase and at <= index]
    want = known[max(places), phase] if places else None
    assert expected(schedule, index, phase) == want
    hash(schedule)  # it rides in the treespec of a state


def test_programs_that_differ_have_other_digests() -> None:
    programs = [(), (0,), (~0,), (0, 1), (1, 0), (0, 1, ~1)]
    assert len({Program(events).digest for events in programs}) == len(programs)
    assert Program((0, 1)).digest == Program((0, 1)).digest


@pytest.mark.parametrize(
    ("events", "live"),
    [
        ((0, 1, 2), [set(), {0, 1}, {1, 2}, {2}]),
        # One that is used again is not let go for one that comes later.
        ((0, 1, 0, 2), [set(), {0, 1}, {0, 1}, {0, 2}, {2}]),
    ],
)
def test_examples(events: tuple[int, ...], live: list[set[int]]) -> None:
    made = plan_program(Program(events), (4, 4, 4), frozenset(), Limits())
    assert Case(events, (4, 4, 4), frozenset(), made).live_sets() == live
