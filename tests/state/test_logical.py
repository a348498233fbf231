"""Which logical ranks a rank carries: laws of `share` and `carried`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.state.logical import carried, share


@given(st.integers(1, 40), st.integers(0, 100))
def test_shares_are_in_order_and_cover_all_as_even_as_can_be(parts: int, count: int) -> None:
    shares = [share(index, parts, count) for index in range(parts)]
    assert [number for one in shares for number in one] == [*range(count)]
    sizes = [len(one) for one in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert (
        [(one.start, one.stop) for one in shares]
        == [  # empty ones, too, are where they would be
            (sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(parts)
        ]
    )


@given(st.integers(1, 20), st.integers(0, 60), st.data())
def test_neighbouring_shares_joined_and_cut_again_are_the_same(
    parts: int, count: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, parts - 1))
    some = range(first, data.draw(st.integers(first + 1, parts)))
    sizes = [len(share(index, parts, count)) for index in some]
    assert sizes == [len(share(index, len(some), sum(sizes))) for index in range(len(some))]


@given(st.integers(1, 40), st.data())
def test_every_rank_carries_a_run_of_logical_ranks(size: int, data: st.DataObject) -> None:
    logical = data.draw(st.integers(size, 80))
    runs = [carried(rank, size, logical) for rank in range(size)]
    assert [one for run in runs for one in run] == [*range(logical)]
    assert all(runs) and len(runs[0]) - len(runs[-1]) <= 1


def test_more_ranks_than_logical_ranks_are_refused() -> None:
    with pytest.raises(fzero.LayoutError, match=r"logical_ranks=2, and there are 3 ranks"):
        carried(0, 3, 2)
