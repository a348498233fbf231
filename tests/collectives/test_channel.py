"""Rounds between ranks: what goes together, what is served, what is told, and how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.collectives import Channel, What, channel_of
from fzero.errors import AxisError, MismatchError, PeerFailedError, PhaseError
from tests.strategies import many

RANKS = 3


class Served:
    """A member that notes what it takes part in."""

    def __init__(self) -> None:
        self.seen: list[tuple[What, int]] = []

    def serve(self, what: What, unit: int) -> None:
        self.seen.append((what, unit))

    def give_way(self) -> None:
        pass

    def meet(self) -> None:
        raise AssertionError("no collective of the user's is in this test")


def on_ranks(body: Callable[[Channel, int], Any], ranks: int = RANKS) -> list[Any]:
    """What `body(channel, rank)` returns on each virtual rank."""
    found: dict[int, Any] = {}

    def run() -> None:
        channel = channel_of(fzero.world())
        assert channel is not None and channel is channel_of(fzero.world())
        found[fzero.axis_index()] = body(channel, fzero.axis_index())

    fzero.simulate(run, world_size=ranks)()
    return [found[rank] for rank in range(ranks)]


def test_one_local_rank_has_nobody_to_ask() -> None:
    assert channel_of(fzero.Axis(size=1)) is None


def test_ranks_that_announce_the_same_ask_no_more() -> None:
    def body(channel: Channel, rank: int) -> Any:
        before = channel.rounds
        channel.announce("forward\nstage 3", hint=7)
        same = channel.answer()
        return same, channel.finish(asked=False), channel.rounds - before

    assert on_ranks(body) == [(True, False, 2)] * RANKS


@pytest.mark.parametrize("served", [False, True])
def test_another_order_is_no_mismatch(served: bool) -> None:
    def body(channel: Channel, rank: int) -> Any:
        channel.announce("forward", hint=rank, served=served)
        return channel.answer(), channel.finish(asked=rank == 1)

    assert on_ranks(body) == [(False, True)] * RANKS


def test_other_passes_that_are_served_ask_for_each_collective() -> None:
    def body(channel: Channel, rank: int) -> Any:
        channel.announce(f"model {rank}", served=True)
        return channel.answer()

    assert on_ranks(body) == [False] * RANKS


def announcements(channel: Channel, rank: int) -> None:
    channel.announce(f"grad_and_reduce\nstage 2\nscale {1 + (rank == 2)}")
    channel.answer()


def calls(channel: Channel, rank: int) -> None:
    channel.call("apply_gradients" + ("\nmax_norm=1.0" if rank == 2 else "\nmax_norm=2.0"))


def one_calls(channel: Channel, rank: int) -> None:
    if rank == 2:
        channel.call("full_params\nstage 3")
    channel.announce("grad_and_reduce\nstage 3")
    channel.answer()


def one_line_more(channel: Channel, rank: int) -> None:
    channel.call("gradients" + "\nof two states" * (rank == 2))


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (announcements, "rank 0 grad_and_reduce with scale 1, rank 2 grad_and_reduce with scale 2"),
        (calls, "rank 0 apply_gradients with max_norm=2.0, rank 2 apply_gradients with max_norm=1"),
        (one_calls, "rank 0 grad_and_reduce, rank 2 full_params"),
        (one_line_more, "rank 0 gradients with nothing, rank 2 gradients with of two states"),
    ],
)
def test_what_does_not_go_together_raises_on_every_rank_and_names_both(
    body: Callable[[Channel, int], None], seen: str
) -> None:
    def caught(channel: Channel, rank: int) -> str:
        with pytest.raises(MismatchError) as error:
            body(channel, rank)
        assert isinstance(error.value, AxisError) and isinstance(error.value, PhaseError)
        assert channel.call("afterwards", rank) == [*range(RANKS)]  # they are in step
        return str(error.value)

    messages = on_ranks(caught)
    assert len({*messages}) == 1 and seen in messages[0]
    assert "Usual cause: " in messages[0] and "Fix: make the same calls" in messages[0]


def test_a_call_gives_the_value_of_each_rank() -> None:
    assert on_ranks(lambda channel, rank: channel.call("step", 10 * rank)) == [[0, 10, 20]] * 3


def test_a_rank_that_calls_serves_those_that_are_in_a_pass() -> None:
    def body(channel: Channel, rank: int) -> Any:
        member = Served()
        number = channel.join(member)
        if rank:
            channel.announce("backward", served=True)
            assert not channel.answer()
            channel.ask(number, What.GATHER, [5])
            assert channel.finish(asked=True)
            told = channel.tell(rank)  # what ranks did in this pass
            assert told == [None, 1, 2]
        return channel.call("step") and member.seen

    assert on_ranks(body) == [[(What.GATHER, 5)]] * RANKS


def test_a_rank_that_is_done_serves_those_that_go_on() -> None:
    def body(channel: Channel, rank: int) -> Any:
        member = Served()
        number = channel.join(member)
        channel.announce("forward", served=True)
        assert channel.answer()
        if rank:  # a backward follows, on these ranks only
            channel.announce("backward", served=True)
            assert not channel.answer()
            channel.ask(number, What.REDUCE, [rank])
        return channel.finish(asked=bool(rank)), member.seen

    assert on_ranks(body) == [(True, [(What.REDUCE, 1), (What.REDUCE, 2)])] * RANKS


asks = st.lists(
    st.lists(st.tuples(st.sampled_from(What), st.integers(0, 20)), min_size=1, max_size=12),
    max_size=4,
)


@given(ranks=many, data=st.data())
def test_whatever_ranks_ask_for_all_take_part_in_one_order(ranks: int, data: st.DataObject) -> None:
    wanted = [data.draw(asks) for _ in range(ranks)]

    def body(channel: Channel, rank: int) -> Any:
        member = Served()
        number = channel.join(member)
        channel.announce("forward", hint=rank)
        channel.answer()
        for some in wanted[rank]:
            for what in What:
                units = [unit for one, unit in some if one is what]
                channel.ask(number, what, units)
                assert {*member.seen}.issuperset((what, unit) for unit in units)
        return channel.finish(asked=bool(wanted[rank])), member.seen

    found = on_ranks(body, ranks)
    assert len({(asked, tuple(seen)) for asked, seen in found}) == 1
    assert {*found[0][1]} == {one for mine in wanted for some in mine for one in some}
    assert found[0][0] == any(wanted)


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}])
@pytest.mark.parametrize("where", ["announced", "asking", "done", "calling"])
def test_a_rank_that_raised_ends_the_others_once(where: str, failing: set[int]) -> None:
    def body(channel: Channel, rank: int) -> str:
        member = Served()
        number = channel.join(member)
        if rank in failing:
            channel.fail()
            message = ""
        else:
            with pytest.raises(PeerFailedError) as caught:
                if where == "announced":
                    channel.announce("forward")
                    channel.answer()
                elif where == "asking":
                    channel.ask(number, What.GATHER, [1])
                elif where == "done":
                    channel.finish(asked=False)
                else:
                    channel.call("step")
            assert not member.seen
            message = str(caught.value)
        channel.announce("forward")  # they go on in step
        assert channel.answer()
        return message

    for rank, message in enumerate(on_ranks(body)):
        if rank not in failing:
            assert f"rank {rank}: the step raised on rank" in message
            assert f"{sorted(failing)}" in message and "Fix: see the error of rank" in message


def test_a_member_that_is_gone_is_told() -> None:
    def body(channel: Channel, rank: int) -> None:
        member = Served()
        number = channel.join(member)
        if rank == 1:
            channel.leave(number)
            with pytest.raises(PhaseError, match=rf"model {number} of this axis, which is closed"):
                channel.finish(asked=False)
        else:
            channel.ask(number, What.GATHER, [0])

    on_ranks(body)


def test_members_have_the_same_number_on_every_rank() -> None:
    def body(channel: Channel, rank: int) -> list[int]:
        members = [Served(), Served()]
        return [channel.join(members[0]), channel.number(), channel.join(members[1])]

    first, *others = on_ranks(body)
    assert all(numbers == first for numbers in others) and len({*first}) == 3
