"""The laws of replays: what ranks start does not depend on what they use themselves."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from fzero.state import replay, residency
from fzero.state.effects import Effect, Free, Gather, Reduce
from fzero.state.replay import Replay
from fzero.state.residency import Residency, Units
from fzero.state.schedule import Limits, Program

UNITS = 5
SYNC = UNITS
NUMELS = (4, 1, 7, 2, 3)
units = st.integers(0, UNITS - 1)
events = st.lists(st.integers(0, SYNC) | units.map(lambda u: ~u), max_size=14).map(tuple)
own_events = st.lists(units | units.map(lambda u: ~u), max_size=8)
limits = st.builds(Limits, prefetch_numel=st.sampled_from([0, 1, 5, 1000]), keeps=st.booleans())


class Case(NamedTuple):
    """The first place in a plan, what is here before, and what ranks do in it."""

    first: Replay
    here: Residency
    ranks: list[list[list[int]]]  # of each rank: its events before each sync point, and the end


def before(whole: frozenset[int] = frozenset(), some: Limits | None = None) -> Residency:
    """Units that are whole before a pass, and pinned."""
    here = tuple(sorted(whole))
    static = Units(numels=NUMELS, limits=some or Limits())
    return Residency(model=1, units=static, gathered=here, pinned=whole)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A plan with any number of sync points, and two ranks, each with events of its own."""
    program, whole = draw(events), draw(st.frozensets(units, max_size=3))
    here = before(whole, draw(limits))
    first = replay.begin(Program(program), here)
    parts = program.count(SYNC) + 1
    own = st.lists(own_events, min_size=parts, max_size=parts)
    return Case(first, here, draw(st.lists(own, min_size=2, max_size=2)))


class Rank:
    """One rank in a plan: does what the transitions ask for, and notes the collectives."""

    def __init__(self, case: Case) -> None:
        self.place: Replay | None = case.first
        self.record = case.here
        self.here = set(case.here.gathered)
        self.started: list[Effect] = []
        self.at_sync_points: list[list[Effect]] = []

    def go(self, to: tuple[Replay | None, Residency, tuple[Effect, ...]]) -> None:
        """Be there, and do what is asked for."""
        self.place, self.record, effects = to
        for effect in effects:
            match effect:
                case Gather(1, unit):
                    assert unit not in self.here, "gathered twice"
                    self.here.add(unit)
                case Free(1, unit):
                    self.here.remove(unit)
                case _:
                    assert effect == Reduce(1, effect.unit)
            self.started += [] if isinstance(effect, Free) else [effect]
        assert self.here == {*self.record.gathered, *self.record.flying}

    def do(self, event: int) -> None:
        """Use a unit, or complete the gradient of one."""
        assert self.place is not None
        if event < 0:
            self.go(replay.start_ready(self.place, self.record, [~event]))
            return
        here, _ = residency.wait(self.record, [*self.record.flying])
        there = replay.use(self.place, here, event)
        if there is not None:
            self.go(there)
            assert event in self.here, "a kernel reads a unit that is not there"

    def run(self, own: list[list[int]]) -> list[Effect]:
        """Go through the whole plan; return the collectives in their order."""
        for number, part in enumerate(own):
            for event in part:
                self.do(event)
            assert self.place is not None
            self.go(replay.to_sync_point(self.place, self.record))
            if number < len(own) - 1:
                assert self.place is not None and self.place.waits
                self.at_sync_points.append(list(self.started))
                self.go(replay.leave_sync_point(self.place, self.record))
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
    assert [x.unit for x in started if isinstance(x, Gather)] == gathers
    assert [x.unit for x in started if isinstance(x, Reduce)] == reduces


def test_a_gradient_is_reduced_when_it_is_complete_and_those_before_it_are() -> None:
    there = replay.use(replay.begin(Program((0, ~2, ~1)), before()), before(), 0)
    assert there is not None
    place, here, _ = there
    place, here, effects = replay.start_ready(place, here, [1])
    assert effects == ()
    place, here, effects = replay.start_ready(place, here, [2])
    assert effects == (Reduce(1, 2), Reduce(1, 1))
    assert replay.start_ready(place, here) == (place, here, ())


def test_what_is_gathered_beside_the_plan_at_a_sync_point_goes_when_all_ranks_have_come() -> None:
    place, here = replay.begin(Program((SYNC, ~0)), before()), before()
    there, here, _ = replay.to_sync_point(replay.start_ready(place, here, [0], most=0)[0], here)
    assert there is not None and there.waits
    again = replay.to_sync_point(there, here)
    assert again == (there, here, ()), "the walk went on without the other ranks"
    assert replay.start_ready(there, here) == (there, here, ())
    for unit, frees in ((3, ()), (1, ()), (2, (Free(1, 3),))):
        there, here, effects = replay.gather_beside(there, here, unit)
        assert effects == frees, "more than two are kept beside the plan"
        here, _ = residency.start(here, unit, inexact=False)
    after, here, effects = replay.leave_sync_point(there, here)
    assert effects == (Free(1, 1), Free(1, 2)), "a rank may be in the collective already"
    assert not after.waits and after.gathered_here == ()
    assert replay.start_ready(after, here)[2] == (Reduce(1, 0),)


def test_a_use_behind_the_next_sync_point_is_not_in_the_plan() -> None:
    place = replay.begin(Program((0, SYNC, 1)), before())
    assert replay.use(place, before(), 1) is None
    assert replay.use(place, before(), 4) is None
