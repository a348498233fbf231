"""Rounds between ranks: how many there are, and that whatever is asked for is served in one order.

What a user sees of them is in tests/gloo: calls that differ (test_calls.py), ranks that go other
ways (test_agreement.py, test_disagreements.py), ranks that raise (test_failures.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.collectives import Channel, What, channel_of
from fzero.errors import PhaseError
from tests.strategies import many

RANKS = 3


class Served:
    """A member that notes what it takes part in."""

    number = 0
    drop_if_raised: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.seen: list[tuple[What, int]] = []

    def serve(self, what: What, unit: int) -> None:
        self.seen.append((what, unit))

    def end_plan(self) -> None:
        pass

    def sync(self) -> None:
        raise AssertionError("no collective of the user's is in this test")

    def wait_all(self) -> None:
        pass


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


@pytest.mark.parametrize(
    ("odd", "served", "same"),
    [
        ({"text": "forward", "hint": 7}, False, True),
        ({"text": "forward", "hint": 1}, False, False),  # another order
        ({"text": "forward", "hint": 1}, True, False),
        ({"text": "another model", "hint": 7}, True, False),
    ],
)
def test_ranks_that_announce_the_same_ask_no_more_and_the_others_each_time(
    odd: dict[str, Any], served: bool, same: bool
) -> None:
    def body(channel: Channel, rank: int) -> Any:
        before = channel.rounds
        mine = odd if rank == 1 else {"text": "forward", "hint": 7}
        channel.announce(**mine, served=served)
        answer = channel.answer()
        channel.finish(asked=not same and rank == 1)
        return answer, channel.rounds - before

    assert on_ranks(body) == [(same, 2)] * RANKS


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


def test_a_member_that_is_gone_is_told() -> None:
    def body(channel: Channel, rank: int) -> None:
        member = Served()
        number = channel.join(member)
        assert {*channel.call("joined", number)} == {number}  # the same on every rank
        if rank == 1:
            channel.leave(number)
            with pytest.raises(PhaseError, match=rf"model {number} of this axis, which is closed"):
                channel.finish(asked=False)
        else:
            channel.ask(number, What.GATHER, [0])

    on_ranks(body)
