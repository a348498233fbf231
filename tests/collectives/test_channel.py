"""Rounds between ranks: how many there are, and that whatever is asked for is served in one order.

What a user sees of them is in tests/gloo: calls that differ (test_calls.py), ranks that go other
ways (test_agreement.py, test_disagreements.py), ranks that raise (test_failures.py). What decides
is tested without ranks in tests/state/test_law14.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.collectives import Performer, performer_of
from fzero.errors import PhaseError
from fzero.state.effects import Effect, Gather, Reduce, TakePart
from fzero.state.protocol import Announcement, Begin, EndForward, Finish, Ready, Units, Use
from fzero.state.rounds import Served
from fzero.state.schedule import Program
from tests.strategies import many

RANKS = 3
UNITS = Units(numels=(1,) * 21)


class Noted:
    """A party that notes what it takes part in."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def perform(self, effect: Effect) -> bool:
        match effect:
            case Gather(_, unit, _) | TakePart(_, unit, _):
                self.seen.append(("gather", unit))
            case Reduce(_, unit, _):
                self.seen.append(("reduce", unit))
            case _:
                pass
        return True  # a reduction starts at once

    def drop_raised(self) -> None:
        pass


def on_ranks(body: Callable[[Performer, int], Any], ranks: int = RANKS) -> list[Any]:
    """What `body(performer, rank)` returns on each virtual rank."""
    found: dict[int, Any] = {}

    def run() -> None:
        performer = performer_of(fzero.world())
        assert performer is not None and performer is performer_of(fzero.world())
        found[fzero.axis_index()] = body(performer, fzero.axis_index())

    fzero.simulate(run, world_size=ranks)()
    return [found[rank] for rank in range(ranks)]


def joined(performer: Performer) -> tuple[Noted, int]:
    party, number = Noted(), performer.number()
    performer.join(party, UNITS, number)
    return party, number


def begin(performer: Performer, number: int, text: str, program: Any, *, served: bool) -> None:
    said = Announcement(text=text, place=(0, 0), program=Program(program), served=Served(served))
    performer.send(Begin(number, said, sums=False))


def test_one_local_rank_has_nobody_to_ask() -> None:
    assert performer_of(fzero.Axis(size=1)) is None


@pytest.mark.parametrize(
    ("odd", "served", "same"),
    [
        (("forward", (0, 1)), False, True),
        (("forward", (1, 0)), False, False),  # another order
        (("forward", (1, 0)), True, False),
        (("another model", (0, 1)), True, False),
    ],
)
def test_ranks_that_announce_the_same_ask_no_more_and_the_others_each_time(
    odd: tuple[str, tuple[int, ...]], served: bool, same: bool
) -> None:
    def body(performer: Performer, rank: int) -> Any:
        party, number = joined(performer)
        before = performer.rounds
        text, program = odd if rank == 1 else ("forward", (0, 1))
        begin(performer, number, text, program, served=served)
        performer.send(Use(number, 0))
        follows = performer.protocol.models[number].course.replay is not None
        performer.send(EndForward(number))
        performer.send(Finish(number))
        return follows, performer.rounds - before, party.seen

    found = on_ranks(body)
    assert [(follows, rounds) for follows, rounds, _ in found] == [(same, 2 if same else 3)] * RANKS
    assert len({tuple(seen) for _, _, seen in found}) == 1  # in one order


wants = st.lists(st.tuples(st.sampled_from(["gather", "reduce"]), st.integers(0, 20)), max_size=12)


@given(ranks=many, data=st.data())
def test_whatever_ranks_ask_for_all_take_part_in_one_order(ranks: int, data: st.DataObject) -> None:
    wanted = [data.draw(wants) for _ in range(ranks)]

    def body(performer: Performer, rank: int) -> Any:
        party, number = joined(performer)
        begin(performer, number, "forward", (rank,), served=False)  # no two expect the same
        for what, unit in wanted[rank]:
            performer.send(Use(number, unit) if what == "gather" else Ready(number, unit))
            assert (what, unit) in party.seen
        performer.send(EndForward(number))
        performer.send(Finish(number))
        return party.seen

    found = on_ranks(body, ranks)
    assert len({tuple(seen) for seen in found}) == 1
    assert {*found[0]} == {one for mine in wanted for one in mine}


def test_a_party_that_is_gone_is_told() -> None:
    def body(performer: Performer, rank: int) -> None:
        party, number = joined(performer)
        assert {*performer.call("joined", number)} == {number}  # the same on every rank
        if rank == 1:
            performer.leave(number)
            with pytest.raises(PhaseError, match=rf"model {number} of this axis, which is closed"):
                performer.call("step")
        else:
            begin(performer, number, "forward", (0,), served=True)
            performer.send(Use(number, 0))
        del party  # till here: a performer holds its parties weakly

    on_ranks(body)
