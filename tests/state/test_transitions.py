"""What single transitions ask for and record, where the laws of all ranks see no difference."""

from __future__ import annotations

from typing import Any

import pytest

from fzero.state.effects import (
    Discard,
    Drop,
    Effect,
    Exchange,
    Free,
    Gather,
    Post,
    Raise,
    Read,
    Receive,
    Reduce,
    TakePart,
    Wait,
    WaitForReductions,
)
from fzero.state.protocol import (
    SYNC,
    Announcement,
    Answer,
    Begin,
    Broke,
    Call,
    Course,
    EndForward,
    Failed,
    Finish,
    GiveUp,
    Join,
    Leave,
    Met,
    Pin,
    Protocol,
    Raised,
    Ready,
    SyncPoint,
    Units,
    Use,
    advance,
)
from fzero.state.rounds import (
    ASKED,
    BROUGHT,
    CODES,
    Asked,
    Message,
    MessageKind,
    Round,
    Served,
    What,
    as_code,
    row_of,
)
from fzero.state.schedule import Limits, Program, backwards

TWO_BUCKETS = Units(numels=(4, 4), bounded=frozenset([0, 1]), gathers=False)


class One:
    """One rank with model 1, which is alone: every round has what it has posted, and no more."""

    def __init__(self, units: Units) -> None:
        self.protocol, _ = advance(Protocol(), Join(1, units))
        self.posts: list[Any] = []
        self.is_answered = True  # by the other ranks, of which there is none
        self.exchanged: tuple[Any, ...] = ()  # what other ranks exchange

    def send(self, event: Any, *peers: list[int]) -> list[Effect]:
        """Send an event; answer its rounds, the first one with rows of `peers` besides."""
        self.protocol, effects = advance(self.protocol, event)
        collected = [*effects]
        while effects and isinstance(effects[-1], Read | Exchange):
            self._post(collected)
            said: Any = (getattr(effects[-1], "value", None), *self.exchanged)
            if said[0] is None:
                waits = effects[-1].waits or self.is_answered
                said = Round([self.row(), *peers]) if waits else None
                peers = ()
            self.protocol, effects = advance(self.protocol, Answer(said))
            collected += effects
        self._post(collected)
        return collected

    def _post(self, effects: list[Effect]) -> None:
        seen = [effect.message for effect in effects if isinstance(effect, Post)]
        self.posts = [*self.posts, *(one for one in seen if one not in self.posts)]

    def row(self) -> list[int]:
        posted = self.protocol.posted
        assert posted is not None
        return row_of(posted)

    def begin(
        self, *events: int, phase: int = 0, program: bool = True, **more: Any
    ) -> list[Effect]:
        """Begin a phase, with the program of these events."""
        known = Program(events) if program else None
        said = Announcement(text="pass", place=(0, phase), program=known, served=Served.ALL)
        return self.send(Begin(1, said, **{"sums": True, **more}))

    @property
    def course(self) -> Course:
        return self.protocol.models[1].course

    def did(self, phase: int = 0) -> tuple[int, ...]:
        """What is recorded of a phase."""
        return self.course.did[0, phase]


def units(count: int, **options: Any) -> Units:
    return Units(numels=(4,) * count, limits=Limits(**{"prefetch_numel": 0, **options}))


ASKS = [MessageKind.ASK, 0, 0, 1]
FAILS = [MessageKind.FAILED, 0, 0, 1]


# What is announced.


def test_below_stage_3_a_forward_is_not_announced() -> None:
    assert One(TWO_BUCKETS).begin() == []


def test_a_forward_is_not_announced_where_all_units_are_pinned() -> None:
    one = One(Units(numels=(4,), persistent=(0,)))
    assert any(isinstance(effect, Post) for effect in one.begin(0))
    one.send(Use(1, 0))
    one.send(EndForward(1))
    one.send(Finish(1))
    assert one.begin(0) == []


@pytest.mark.parametrize("served", [False, True])
def test_what_is_announced_says_whether_others_serve_it(served: bool) -> None:
    one = One(units(1))
    said = Announcement(text="pass", place=(0, 0), program=Program((0,)), served=Served(served))
    one.send(Begin(1, said, sums=True))
    assert one.protocol.posted is not None
    assert one.protocol.posted.served == served


@pytest.mark.parametrize("kind", [MessageKind.PASS, MessageKind.CALL])
@pytest.mark.parametrize("served", [False, True])
def test_a_pass_and_another_message_differ_if_it_is_not_served(
    kind: MessageKind, served: bool
) -> None:
    one = One(units(1))
    one.begin(0)
    effects = one.send(Use(1, 0), [kind, 7, 0, served])
    assert (Raise() in effects) == (not served)


def test_a_call_and_a_pass_differ_if_it_is_not_served() -> None:
    one = One(units(1))
    effects = one.send(Call("step"), [MessageKind.PASS, 7, 0, False])
    assert effects[-2:] == [WaitForReductions(), Raise()]


def test_a_pass_of_another_model_with_the_same_program_has_another_plan() -> None:
    one = One(units(1))
    one.begin(0)
    hint = one.row()[2]
    one.send(Use(1, 0), [MessageKind.PASS, 7, hint, 1])
    assert one.course.replay is None
    assert one.course.asked


# What ends in an error.


def test_after_calls_that_differ_nothing_of_the_event_is_done() -> None:
    one = One(units(2))
    one.begin(0, 1)
    effects = one.send(Use(1, 0), [MessageKind.CALL, 7, 0, 0])
    assert effects == [Read(), WaitForReductions(), Raise()]
    assert (one.protocol.agenda, one.protocol.open) == ((), None)
    assert one.protocol.known


def test_after_an_error_of_another_rank_nothing_of_the_event_is_done() -> None:
    one = One(units(2))
    one.begin(0, 1)
    effects = one.send(Use(1, 0), FAILS)
    assert effects == [Read(), WaitForReductions(), Raise((1,))]
    assert (one.protocol.agenda, one.protocol.open) == ((), None)
    assert one.protocol.known


def test_the_message_of_a_call_is_kept_for_the_error_that_names_it() -> None:
    one = One(units(1))
    one.send(Call("step"), [MessageKind.CALL, 7, 0, 1])
    assert one.protocol.posted is not None
    assert one.protocol.posted.text == "step"


def test_what_was_served_before_an_error_is_discarded_once() -> None:
    one = One(TWO_BUCKETS)
    asked = [*ASKS, 1 + as_code(Asked(1, What.REDUCE, 0))]
    one.protocol, _ = advance(one.protocol, Call("step"))
    one.protocol, effects = advance(one.protocol, Answer(Round([one.row(), asked])))
    assert effects[0] == Reduce(1, 0, mine=False)
    assert one.protocol.served == (1,)
    assert not one.protocol.heard
    one.protocol, _ = advance(one.protocol, Call("step"))
    one.protocol, effects = advance(one.protocol, Answer(Round([one.row(), FAILS])))
    assert effects == (WaitForReductions(), Discard(1), Raise((1,)))
    assert one.protocol.served == ()


@pytest.mark.parametrize(("hint", "taken"), [(BROUGHT, Receive), (0, Discard)])
def test_what_was_served_is_received_once_if_any_rank_brought_gradients(
    hint: int, taken: type[Receive | Discard]
) -> None:
    one = One(TWO_BUCKETS)
    asked = [*ASKS, 1 + as_code(Asked(1, What.REDUCE, 0))]
    one.protocol, _ = advance(one.protocol, Call("step"))
    one.protocol, _ = advance(one.protocol, Answer(Round([one.row(), asked])))
    one.protocol, _ = advance(one.protocol, Call("step"))
    effects = one.send(Answer(Round([one.row(), [MessageKind.DONE, 0, hint, 1]])))
    assert effects[:2] == [WaitForReductions(), taken(1)]
    assert one.protocol.served == ()


def test_what_was_served_in_a_forward_is_received_when_the_others_have_ended() -> None:
    one = One(units(2))
    one.begin(0, 1)
    one.send(Use(1, 0))
    asked = [*ASKS, 1 + as_code(Asked(1, What.REDUCE, 1))]
    assert Reduce(1, 1, mine=False) in one.send(Call("step"), asked)
    assert one.send(Call("step"), [MessageKind.DONE, 0, BROUGHT, 1])[-2:] == [
        WaitForReductions(),
        Receive(1),
    ]


def test_a_rank_that_heard_of_an_error_asks_for_nothing() -> None:
    one = One(TWO_BUCKETS)
    one.begin(*backwards(2).events, phase=1)
    assert isinstance(one.send(Ready(1, 1), FAILS)[-1], Raise)
    assert one.send(Failed(1, astray=True)) == [Drop(1)]


def test_an_error_is_known_until_the_next_round() -> None:
    one = One(TWO_BUCKETS)
    one.send(Raised())
    assert one.protocol.known
    one.send(Call("step"))
    assert not one.protocol.known
    one.send(Raised())
    one.begin(*backwards(2).events, phase=1)
    assert not one.protocol.known


def test_an_error_of_the_pass_before_is_not_that_of_a_forward_which_nobody_was_told_of() -> None:
    one = One(TWO_BUCKETS)
    one.send(Raised())
    one.begin()
    effects = one.send(Failed(1, astray=False))
    assert [one.message.kind for one in effects if isinstance(one, Post)] == [MessageKind.FAILED]


def test_what_an_error_has_prevented_is_forgotten_with_the_pass() -> None:
    one = One(units(2))
    one.begin(0, 1)
    one.send(Use(1, 0))
    one.send(Broke((Gather(1, 1, exact=True),)))
    assert one.send(GiveUp(1)) == [Discard(1), Free(1, 0)]
    assert one.protocol.undone == ()


# What is recorded.


def test_a_use_is_recorded_once_while_the_unit_is_the_current_one() -> None:
    one = One(units(3))
    one.begin(0, 1, 0)
    for unit in (0, 0, 1, 1, 0):
        one.send(Use(1, unit))
    assert one.did() == (0, 1, 0)
    assert one.send(Use(1, 0)) == []


def test_a_use_that_the_plan_lacks_is_recorded_once() -> None:
    one = One(units(2))
    one.begin(0)
    for unit in (0, 1, 1):
        one.send(Use(1, unit))
    assert one.did() == (0, 1)


def test_a_use_is_recorded_once_in_a_pass_that_keeps_what_is_gathered() -> None:
    one = One(units(2, keeps=True))
    one.begin(0, 1)
    for unit in (0, 1, 0, 1):
        one.send(Use(1, unit))
    assert one.did() == (0, 1)


def test_a_use_of_a_persistent_unit_is_not_recorded() -> None:
    one = One(Units(numels=(4, 4), persistent=(0,)))
    one.begin(1)
    for unit in (0, 1, 0):
        one.send(Use(1, unit))
    assert one.did() == (1,)


def test_a_use_behind_a_sync_point_is_recorded_again() -> None:
    one = One(units(1))
    one.begin(0, 1, 0)
    one.send(Use(1, 0))
    one.send(SyncPoint())
    one.send(Use(1, 0))
    assert one.did() == (0, 1, 0)


def reduced(effects: list[Effect]) -> list[int]:
    return [effect.unit for effect in effects if isinstance(effect, Reduce)]


def test_a_backward_beside_another_pass_is_announced_at_its_end() -> None:
    one = One(TWO_BUCKETS)
    one.protocol, _ = advance(one.protocol, Join(2, TWO_BUCKETS))
    program = backwards(2).events
    one.begin(*program)
    said = Announcement(text="another", place=(0, 0), program=backwards(2), served=Served.ALL)
    one.send(SyncPoint())
    one.send(Begin(2, said, sums=True))
    assert one.begin(*program, phase=1) == []
    assert one.send(Ready(1, 1)) == [] == one.send(Ready(1, 0)), "each bucket asks the other ranks"
    assert reduced(one.send(Finish(1, ((0, True), (1, True))))) == [1, 0]
    # Alone, it is announced where it begins.
    one.send(Finish(2))
    one.begin(*program)
    one.send(SyncPoint())
    assert one.begin(*program, phase=1) != []


def test_a_collective_after_a_forward_counts_where_its_backward_will_come() -> None:
    one = One(TWO_BUCKETS)
    one.begin(*backwards(2).events)
    one.send(SyncPoint(connects=False))  # of a checkpoint, maybe: nobody knows
    one.send(EndForward(1))
    for connects, wanted in ((False, 1), (True, 2), (False, 2)):
        one.send(SyncPoint(connects=connects))
        assert one.course.calls == wanted
    one.send(SyncPoint(connects=False))
    one.send(Met(connects=True))  # by what another rank gives
    assert one.course.calls == 3


def test_a_pass_knows_of_a_collective_that_another_has_made_before_it() -> None:
    one = One(TWO_BUCKETS)
    one.protocol, _ = advance(one.protocol, Join(2, TWO_BUCKETS))
    one.begin(*backwards(2).events)
    one.send(SyncPoint())
    for phase in (0, 1):
        said = Announcement(
            text="another", place=(0, phase), program=backwards(2), served=Served.ALL
        )
        assert one.send(Begin(2, said, sums=True)) == []
    assert one.protocol.models[2].course.deferred


def test_a_collective_that_only_a_backward_makes_is_expected_from_then_on() -> None:
    one = One(TWO_BUCKETS)
    for number, wanted in enumerate(([1, 0], [])):
        one.begin(*backwards(2).events)
        one.begin(*backwards(2).events, phase=1)
        assert reduced(one.send(SyncPoint())) == wanted, f"pass {number}"
        one.send(Finish(1))


def test_a_use_that_begins_the_next_phase_is_recorded_there() -> None:
    one = One(units(2))
    one.send(Pin(1, (0,)))
    one.begin(0)
    one.send(Use(1, 0))
    one.send(EndForward(1))
    one.begin(0, phase=1)
    one.send(Use(1, 0))
    assert one.did(1) == (0,)


def test_a_use_between_the_phases_is_not_recorded() -> None:
    one = One(units(2))
    one.begin(0)
    one.send(Use(1, 0))
    one.send(EndForward(1))
    one.send(Pin(1, (0, 1)))
    one.send(Use(1, 1))
    assert one.did() == (0,)


@pytest.mark.parametrize("rounds", [False, True])
def test_values_are_rounded_in_a_pass_that_rounds(rounds: bool) -> None:
    one = One(Units(numels=(4,), rounds=frozenset([0])))
    one.begin(0, rounds=rounds)
    assert Gather(1, 0, exact=not rounds) in one.send(Use(1, 0))
    one = One(Units(numels=(4,), rounds=frozenset([0])))
    one.begin(program=False, rounds=rounds)
    assert Gather(1, 0, exact=not rounds) in one.send(Use(1, 0))


def reads_exactly(one: One) -> bool:
    """Whether a read outside of a pass replaces the rounded values of unit 0."""
    effects = one.send(Use(1, 0))
    return Free(1, 0) in effects and Gather(1, 0, exact=True) in effects


KEPT = Units(numels=(4,), rounds=frozenset([0]), limits=Limits(keeps=True))


def test_a_phase_that_is_exact_drops_rounded_values_before_it_is_announced() -> None:
    one = One(Units(numels=(4, 4), rounds=frozenset([0]), limits=Limits(prefetch_numel=0)))
    one.begin(0, 1)
    one.send(Use(1, 0))
    assert one.begin(0, phase=1, silent=True, rounds=False) == [Free(1, 0)]


@pytest.mark.parametrize("again", [False, True])
def test_a_read_between_the_phases_is_exact(again: bool) -> None:
    one = One(KEPT)
    for _ in range(1 + again):  # the second forward gathers nothing
        one.begin(0, stays=True)
        one.send(Use(1, 0))
        one.send(EndForward(1))
    assert reads_exactly(one)


@pytest.mark.parametrize("again", [False, True])
def test_a_read_behind_a_pass_in_a_window_is_exact(again: bool) -> None:
    one = One(KEPT)
    for _ in range(1 + again):  # the second backward gathers nothing
        one.begin(0, phase=1, sums=False, stays=True)
        one.send(Use(1, 0))
        one.send(Finish(1))
    assert reads_exactly(one)


# Which units go first, and how far a plan is followed.


def test_of_units_that_were_asked_for_the_one_that_was_used_last_stays() -> None:
    one = One(units(3))
    one.begin(program=False)
    for unit in (0, 1, 0):
        one.send(Use(1, unit))
    effects = one.send(Use(1, 2))
    assert Free(1, 1) in effects
    assert Free(1, 0) not in effects


def test_a_rank_that_asks_keeps_persistent_units_beyond_its_pass() -> None:
    one = One(Units(numels=(4, 4, 4), persistent=(0, 1)))
    one.begin(program=False, phase=1)
    one.send(Use(1, 2))
    one.send(Finish(1))
    assert one.protocol.models[1].residency.gathered == (0, 1)
    one.begin(0, 1)
    assert one.send(Use(1, 0)) == [Read()]


def test_a_unit_that_a_block_holds_does_not_carry_the_plan_beyond_uses_to_come() -> None:
    one = One(units(3))
    one.send(Pin(1, (0,)))
    one.begin(1, 2, 0)
    assert Gather(1, 1, exact=False) not in one.send(Use(1, 0))
    assert one.send(Use(1, 1)) == [Gather(1, 1, exact=True), Wait(1, 1)]
    assert one.send(Use(1, 0)) == []


def test_a_unit_that_is_here_and_not_in_the_plan_does_not_end_it() -> None:
    one = One(units(3))
    one.send(Pin(1, (0,)))
    one.begin(1, 2)
    one.send(Use(1, 1))
    assert one.send(Use(1, 0)) == []
    assert one.course.replay is not None
    assert not one.course.asked


def test_a_rank_leaves_its_plan_at_a_sync_point_to_which_another_came_without_it() -> None:
    one = One(units(2))
    one.begin(0, 2, 1)
    one.send(Use(1, 0))
    effects = one.send(SyncPoint(), row_of(Message(MessageKind.CALL, SYNC)))
    assert [type(effect) for effect in effects] == [Free, Post, Read]
    assert one.course.replay is None
    assert one.course.asked


# Below stage 3.


def test_a_rank_goes_on_with_one_bucket_while_another_has_not_begun() -> None:
    one = One(TWO_BUCKETS)
    one.begin(*backwards(2).events, phase=1)
    one.is_answered = False
    assert one.send(Ready(1, 1)) == [Read(waits=False)]
    assert one.send(Ready(1, 0)) == [Read(), Reduce(1, 1), Reduce(1, 0)]


def test_a_rank_whose_announcement_was_answered_does_not_keep_its_bucket() -> None:
    one = One(TWO_BUCKETS)
    one.begin(*backwards(2).events, phase=1)
    assert one.send(Ready(1, 1)) == [Read(waits=False), Reduce(1, 1)]


def test_at_stage_3_a_bucket_is_not_kept() -> None:
    one = One(units(2))
    one.begin(0, ~0, phase=1)
    one.is_answered = False
    assert one.send(Ready(1, 0))[0] == Read()


def test_a_call_in_a_backward_reads_the_announcement_first() -> None:
    one = One(TWO_BUCKETS)
    one.begin(*backwards(2).events, phase=1)
    assert one.send(Call("a collective of the user's")) == [Read()]
    assert not one.protocol.heard
    effects = one.send(Call("a collective of the user's"))
    assert [type(effect) for effect in effects] == [Post, Read]


# The end of a pass.


def has_asked(one: One) -> bool:
    """Whether a rank says at the end of its pass that it has asked."""
    effects = one.send(Finish(1))
    done = [
        x.message for x in effects if isinstance(x, Post) and x.message.kind == MessageKind.DONE
    ]
    assert len(done) == 1
    asked = bool(done[0].hint & ASKED)
    assert asked == any(isinstance(effect, Exchange) for effect in effects)
    return asked


def test_a_pass_that_followed_its_plan_asks_for_no_exchange() -> None:
    one = One(units(1))
    one.begin(0, phase=1)
    one.send(Use(1, 0))
    assert not has_asked(one)
    assert one.course == Course(crosses=True)


def test_a_sync_point_that_never_came_is_learned() -> None:
    one = One(units(1))
    one.begin(0, 1, phase=1)
    one.send(Use(1, 0))
    assert has_asked(one)
    assert one.course == Course(crosses=True, learned={(0, 1): Program((0,))})


def test_what_was_asked_before_a_sync_point_is_learned() -> None:
    one = One(units(1))
    one.begin(phase=1, program=False)
    one.send(SyncPoint())
    assert has_asked(one)


def test_only_what_is_not_complete_is_recorded_of_what_is_left() -> None:
    one = One(TWO_BUCKETS)
    one.begin(phase=1, program=False)
    effects = one.send(Finish(1, ((0, True), (1, False))))
    assert Exchange((1, {(0, 1): (~1,)})) in effects


def test_a_model_learns_from_its_own_passes_alone() -> None:
    one = One(units(1))
    one.begin(phase=1, program=False)
    one.send(Use(1, 0))
    one.exchanged = ((2, {(3, 1): (0,)}), (1, {(0, 1): (0,)}), None)
    assert has_asked(one)
    assert one.course.learned == {(0, 1): Program((0,))}


def test_what_was_learned_is_told_once() -> None:
    one = One(units(1))
    one.begin(phase=1, program=False)
    one.send(Use(1, 0))
    assert has_asked(one)
    assert one.course.learned
    one.begin(0, phase=1)
    one.send(Use(1, 0))
    assert not has_asked(one)
    assert one.course == Course(crosses=True)


def test_what_was_learned_is_not_told_by_a_pass_of_which_nobody_heard() -> None:
    one = One(TWO_BUCKETS)
    one.begin(phase=1, program=False)
    assert has_asked(one)
    assert one.course.learned
    one.begin(phase=1, silent=True)
    assert one.send(Finish(1)) == []
    assert not one.course.learned


def test_what_another_rank_asked_for_in_the_same_round_is_not_asked_for_again() -> None:
    one = One(Units(numels=(4,) * (CODES + 2), gathers=False))
    one.begin(phase=1, program=False)
    one.send(Call("a collective of the user's"))  # reads the announcement
    theirs = [*ASKS, 1 + as_code(Asked(1, What.REDUCE, CODES))]
    effects = one.send(Finish(1, tuple((unit, False) for unit in range(CODES + 2))), theirs)
    reduced = [effect.unit for effect in effects if isinstance(effect, Reduce)]
    assert reduced == [*range(CODES + 2)]
    assert all(effect.mine for effect in effects if isinstance(effect, Reduce))


# Two models.


def test_a_block_ends_the_plan_of_another_model() -> None:
    one = One(units(2))
    one.send(Join(2, units(1)))
    one.begin(0, 1)
    one.send(Use(1, 0))
    effects = one.send(Pin(2, (0,)))
    assert effects[:2] == [Free(1, 0), Gather(1, 1, exact=True)]
    assert [type(effect) for effect in effects[2:]] == [Post, Read, Gather, Wait]
    assert one.course.replay is None


def test_a_bucket_that_a_rank_has_kept_is_reduced_before_a_pass_of_another_model() -> None:
    one = One(TWO_BUCKETS)
    one.send(Join(2, units(1)))
    one.begin(phase=1, program=False)
    one.is_answered = False
    assert one.send(Ready(1, 0)) == [Read(waits=False)]
    said = Announcement(text="pass of 2", place=(0, 0), served=Served.ALL)
    effects = one.send(Begin(2, said, sums=True))
    assert [type(effect) for effect in effects] == [Read, Post, Read, Reduce, Post]
    assert one.course.due == ()


# A model that has left.


def test_a_rank_takes_part_in_a_gather_of_a_model_that_has_left() -> None:
    one = One(units(1))
    one.send(Leave(1))
    effects = one.send(Call("step"), [*ASKS, 1 + as_code(Asked(1, What.GATHER, 0))])
    assert TakePart(1, 0, exact=True) in effects
    assert 1 not in one.protocol.models
    assert Receive(1) not in effects


@pytest.mark.parametrize("calls", [Served.ALL, Served.ALL | 2, Served.ALL | 4, Served.ALL | 6])
@pytest.mark.parametrize("served", [Served.ALL, Served.NOBODY, 2, 4])
def test_who_goes_with_a_pass(served: int, calls: int) -> None:
    """A call goes with a pass whose bit it has; another pass with `ALL` alone."""
    mine, call = [MessageKind.PASS, 1, 0, served], [MessageKind.CALL, 2, 0, calls]
    assert Round([mine, call]).is_served is bool(served & calls)
    other = [MessageKind.PASS, 3, 0, served]
    assert Round([mine, other, call]).is_served is (served == Served.ALL)
    assert Round([mine, mine, call]).is_served is bool(served & calls)
    assert Round([mine, call, [MessageKind.CALL, 4, 0, Served.ALL]]).is_served is (served == 1)
