"""The laws of replays: what ranks start does not depend on what they use themselves."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from fzero.state import replay
from fzero.state.effects import FreeUnit, GatherUnit, PlanEffect, ReduceUnit
from fzero.state.replay import Replay
from fzero.state.schedule import Limits, Program

UNITS = 5
SYNC = UNITS
NUMELS = (4, 1, 7, 2, 3)
units = st.integers(0, UNITS - 1)
events = st.lists(st.integers(0, SYNC) | units.map(lambda u: ~u), max_size=14).map(tuple)
own_events = st.lists(units | units.map(lambda u: ~u), max_size=8)
limits = st.builds(Limits, prefetch_numel=st.sampled_from([0, 1, 5, 1000]), keeps=st.booleans())


class Case(NamedTuple):
    """The first place in a plan, the units that are whole before, and what ranks do in it."""

    first: Replay
    whole: frozenset[int]
    ranks: list[list[list[int]]]  # of each rank: its events before each sync point, and the end


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A plan with any number of sync points, and two ranks, each with events of its own."""
    program, whole = draw(events), draw(st.frozensets(units, max_size=3))
    first = replay.begin(Program(program), NUMELS, whole, draw(limits))
    parts = program.count(SYNC) + 1
    own = st.lists(own_events, min_size=parts, max_size=parts)
    return Case(first, whole, draw(st.lists(own, min_size=2, max_size=2)))


class Rank:
    """One rank in a plan: does what the transitions ask for, and notes the collectives."""

    def __init__(self, case: Case) -> None:
        self.place: Replay | None = case.first
        self.here = set(case.whole)
        self.started: list[PlanEffect] = []
        self.at_sync_points: list[list[PlanEffect]] = []

    def go(self, to: tuple[Replay | None, tuple[PlanEffect, ...]]) -> None:
        """Be there, and do what is asked for."""
        self.place = to[0]
        for effect in to[1]:
            match effect:
                case GatherUnit(unit):
                    assert unit not in self.here, "gathered twice"
                    self.here.add(unit)
                case FreeUnit(unit):
                    self.here.remove(unit)
                case ReduceUnit():
                    pass
            self.started += [] if isinstance(effect, FreeUnit) else [effect]

    def do(self, event: int) -> None:
        """Use a unit, or complete the gradient of one."""
        assert self.place is not None
        if event < 0:
            self.go(replay.start_ready(replay.complete(self.place, [~event])))
            return
        there = replay.use(self.place, event, held=event in self.here)
        if there is not None:
            self.go(there)
            assert event in self.here, "a kernel reads a unit that is not there"

    def run(self, own: list[list[int]]) -> list[PlanEffect]:
        """Go through the whole plan; return the collectives in their order."""
        for number, part in enumerate(own):
            for event in part:
                self.do(event)
            assert self.place is not None
            self.go(replay.to_sync_point(self.place))
            if number < len(own) - 1:
                assert self.place is not None and self.place.waits
                self.at_sync_points.append(list(self.started))
                self.go(replay.leave_sync_point(self.place))
        assert self.place is None
        return self.started


@given(case=cases())
def test_every_rank_starts_the_same_collectives_in_the_same_order(case: Case) -> None:
    idle, *ranks = (Rank(case) for _ in range(3))
    expected = idle.run([[] for _ in case.ranks[0]])
    for rank, own in zip(ranks, case.ranks, strict=True):
        assert rank.run(own) == expected
        assert rank.at_sync_points == idle.at_sync_points, "where ranks wait they are not alike"


@given(case=cases())
def test_all_that_the_plan_has_runs_once(case: Case) -> None:
    rank = Rank(case)
    started = rank.run(case.ranks[0])
    steps = case.first.plan.steps
    gathers = [unit for step in steps for unit in (*step.gathers, *step.ahead)]
    reduces = [unit for step in steps for unit in step.reduces]
    assert [x.unit for x in started if isinstance(x, GatherUnit)] == gathers
    assert [x.unit for x in started if isinstance(x, ReduceUnit)] == reduces


def test_a_gradient_is_reduced_when_it_is_complete_and_those_before_it_are() -> None:
    place = replay.begin(Program((0, ~2, ~1)), NUMELS, frozenset(), Limits())
    there = replay.use(place, 0, held=False)
    assert there is not None
    place, effects = replay.start_ready(replay.complete(there[0], [1]))
    assert effects == ()
    place, effects = replay.start_ready(replay.complete(place, [2]))
    assert effects == (ReduceUnit(2), ReduceUnit(1))
    assert replay.start_ready(place) == (place, ())


def test_what_is_gathered_beside_the_plan_at_a_sync_point_goes_when_all_ranks_have_come() -> None:
    place = replay.begin(Program((SYNC, ~0)), NUMELS, frozenset(), Limits())
    there, _ = replay.to_sync_point(replay.complete(place, [0]))
    assert there is not None and there.waits
    assert replay.to_sync_point(there) == (there, ()), "the walk went on without the other ranks"
    assert replay.start_ready(there) == (there, ())
    there, frees = replay.gather_beside(replay.gather_beside(there, 3)[0], 1)
    assert frees == ()
    there, frees = replay.gather_beside(there, 2)
    assert frees == (FreeUnit(3),), "more than two are kept beside the plan"
    after, effects = replay.leave_sync_point(there)
    assert effects == (FreeUnit(1), FreeUnit(2), ReduceUnit(0))
    assert not after.waits and after.gathered_here == ()


def test_a_use_behind_the_next_sync_point_is_not_in_the_plan() -> None:
    place = replay.begin(Program((0, SYNC, 1)), NUMELS, frozenset(), Limits())
    assert replay.use(place, 1, held=False) is None
    assert replay.use(place, 4, held=False) is None
