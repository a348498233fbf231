"""The laws of plans: what is gathered when, how much is whole at once, and unions of programs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.state.schedule import Limits, Plan, Program, Schedule, expected, plan, record, union

UNITS = 6
units = st.integers(0, UNITS - 1)
events = st.lists(units | units.map(lambda u: ~u), max_size=14).map(tuple)
numels = st.lists(st.integers(1, 9), min_size=UNITS, max_size=UNITS).map(tuple)
helds = st.frozensets(units, max_size=3)
limits = st.builds(Limits, prefetch_numel=st.sampled_from([0, 1, 5, 12, 1000]), keeps=st.booleans())


def live_sets(made: Plan) -> list[set[int]]:
    """The units that are whole, or on the way, while each step of the plan runs."""
    live: set[int] = set()
    found = []
    for step in made.steps:
        assert live.issuperset(step.frees), "freed before it was gathered"
        live -= {*step.frees}
        starts = [*step.gathers, *step.ahead]
        assert live.isdisjoint(starts) and len({*starts}) == len(starts), "gathered twice"
        live |= {*starts}
        found.append(set(live))
    return found


@given(events=events, numels=numels, held=helds, limits=limits)
def test_every_use_finds_its_unit_whole(
    events: tuple[int, ...], numels: tuple[int, ...], held: frozenset[int], limits: Limits
) -> None:
    made = plan(Program(events), numels, held, limits)
    assert [step.unit for step in made.steps] == [-1, *(e for e in events if e >= 0)]
    for step, live in zip(made.steps[1:], live_sets(made)[1:], strict=True):
        assert step.unit in live | held
        assert held.isdisjoint(live)


@given(events=events, numels=numels, held=helds, limits=limits)
def test_every_reduction_stays_behind_the_use_that_it_followed(
    events: tuple[int, ...], numels: tuple[int, ...], held: frozenset[int], limits: Limits
) -> None:
    made = plan(Program(events), numels, held, limits)
    flat = [event for step in made.steps for event in (step.unit, *(~u for u in step.reduces))]
    assert tuple(flat[1:]) == events


@given(events=events, numels=numels, held=helds)
def test_at_most_two_units_are_whole_at_once(
    events: tuple[int, ...], numels: tuple[int, ...], held: frozenset[int]
) -> None:
    """The one in use, and the next: gathered early, or still there."""
    for prefetch_numel in (0, 1):
        made = plan(Program(events), numels, held, Limits(prefetch_numel=prefetch_numel))
        assert all(len(live) <= 2 for live in live_sets(made))


@given(events=events, numels=numels, held=helds, prefetch_numel=st.integers(2, 30))
def test_what_is_gathered_early_fits_the_limit(
    events: tuple[int, ...], numels: tuple[int, ...], held: frozenset[int], prefetch_numel: int
) -> None:
    """But for the next unit, which comes early whatever its size, and what it found there."""
    made = plan(Program(events), numels, held, Limits(prefetch_numel=prefetch_numel))
    for step, live in zip(made.steps, live_sets(made), strict=True):
        waiting = live - {step.unit}
        if step.ahead and len(waiting) > 1:
            assert sum(numels[unit] for unit in waiting) <= prefetch_numel


@given(events=events, numels=numels, held=helds)
def test_the_next_use_is_gathered_one_use_before(
    events: tuple[int, ...], numels: tuple[int, ...], held: frozenset[int]
) -> None:
    made = plan(Program(events), numels, held, Limits())
    sets = live_sets(made)
    for before, live, step in zip(made.steps[1:], sets[1:], made.steps[2:], strict=False):
        assert step.unit in live | held or before.unit == step.unit


@given(events=events, numels=numels, held=helds)
def test_what_is_kept_is_gathered_once(
    events: tuple[int, ...], numels: tuple[int, ...], held: frozenset[int]
) -> None:
    made = plan(Program(events), numels, held, Limits(keeps=True))
    starts = [u for step in made.steps for u in (*step.gathers, *step.ahead)]
    assert sorted(starts) == sorted({e for e in events if e >= 0} - held)
    assert not any(step.frees for step in made.steps)


@given(events=events, numels=numels, held=helds, limits=limits, data=st.data())
def test_whatever_a_rank_reads_the_collectives_have_one_order(
    events: tuple[int, ...],
    numels: tuple[int, ...],
    held: frozenset[int],
    limits: Limits,
    data: st.DataObject,
) -> None:
    """A rank goes on to the next use of what it reads, and at the end to the last step."""
    made = plan(Program(events), numels, held, limits)
    reads = data.draw(st.lists(units, max_size=6))
    at, steps = 0, [made.steps[0]]
    for unit in reads:
        place = made.next_use(unit, at)
        assert place is None or (place > at and made.steps[place].unit == unit)
        if place is None:
            assert unit not in [step.unit for step in made.steps[at + 1 :]]
            continue
        steps += made.steps[at + 1 : place + 1]
        at = place
    assert (*steps, *made.steps[at + 1 :]) == made.steps


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
        schedule = record(schedule, at, which, Program(program))
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
        ((0, 0, 1), [set(), {0, 1}, {0, 1}, {1}]),
    ],
)
def test_examples(events: tuple[int, ...], live: list[set[int]]) -> None:
    assert live_sets(plan(Program(events), (4, 4, 4), frozenset(), Limits())) == live
