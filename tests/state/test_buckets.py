"""Buckets of gradients: every order of filling against a model that reads the whole history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.state.buckets import Buckets, Launches, filled, finish, restart


class Backward(NamedTuple):
    """How many buckets there are, and which get full in one backward, in that order."""

    count: int
    order: list[int]


@st.composite
def backwards(draw: st.DrawFn) -> Backward:
    """Some of the buckets or all of them, in any order, some of them again and again."""
    count = draw(st.integers(0, 9))
    order = draw(st.permutations(range(count)))
    if draw(st.booleans()):
        order = order[: draw(st.integers(0, count))]
    again = draw(st.lists(st.integers(0, count - 1), max_size=5)) if count else []
    return Backward(count, list(draw(st.permutations([*order, *again]))))


def flat(effects: Launches) -> list[int]:
    return list(chain.from_iterable(effect.buckets for effect in effects))


def run(s: Buckets, order: Sequence[int]) -> tuple[Buckets, list[list[int]]]:
    """Fill in `order`; return the record, and what each one launched."""
    launched = []
    for bucket in order:
        s, effects = filled(s, bucket)
        assert len(effects) <= 1
        launched.append(flat(effects))
    return s, launched


def whole(s: Buckets, order: Sequence[int], waiting: frozenset[int] = frozenset()) -> list[int]:
    """All that a backward launches, in order."""
    s, launched = run(s, order)
    return [*chain(*launched), *flat(finish(s, waiting)[1])]


def gone(count: int, order: Sequence[int], *, in_turn: bool) -> list[int]:
    """The buckets that are launched when `order` has been filled, by reading all of it again."""
    missing = [bucket for bucket in range(count) if bucket not in order]
    return list(range(min(missing, default=count))) if in_turn else sorted(set(order))


@settings(max_examples=500)
@given(backwards(), st.booleans(), st.sets(st.integers(0, 8)))
def test_any_order_launches_what_its_whole_history_says(
    backward: Backward, in_turn: bool, waiting: set[int]
) -> None:
    count, order = backward
    s = Buckets(count=count, in_turn=in_turn)
    for at, bucket in enumerate(order):
        before, after = (gone(count, order[:end], in_turn=in_turn) for end in (at, at + 1))
        s, effects = filled(s, bucket)
        assert flat(effects) == [b for b in after if b not in before]
    held = frozenset(waiting) & frozenset(range(count))
    rest = range(count) if in_turn else held
    s, effects = finish(s, held)
    assert flat(effects) == [
        b for b in sorted(rest) if b not in gone(count, order, in_turn=in_turn)
    ]
    assert s == Buckets(count=count, in_turn=in_turn)


@given(backwards())
def test_in_turn_a_backward_launches_each_bucket_once_in_index_order(backward: Backward) -> None:
    assert whole(Buckets(count=backward.count), backward.order) == list(range(backward.count))


@given(backwards(), st.sets(st.integers(0, 8)))
def test_out_of_turn_a_backward_launches_what_is_full_or_waits_and_that_once(
    backward: Backward, waiting: set[int]
) -> None:
    held = frozenset(waiting) & frozenset(range(backward.count))
    launched = whole(Buckets(count=backward.count, in_turn=False), backward.order, held)
    assert sorted(launched) == sorted({*backward.order} | held)


@given(backwards(), st.booleans())
def test_before_the_end_no_bucket_is_launched_that_is_not_full(
    backward: Backward, in_turn: bool
) -> None:
    _, launched = run(Buckets(count=backward.count, in_turn=in_turn), backward.order)
    for at, buckets in enumerate(launched):
        assert set(buckets) <= set(backward.order[: at + 1])


@given(st.data(), backwards())
def test_ranks_that_fill_others_in_another_order_launch_the_same_sequence(
    data: st.DataObject, one: Backward
) -> None:
    other = data.draw(
        st.lists(st.integers(0, one.count - 1), max_size=12) if one.count else st.just([])
    )
    new = Buckets(count=one.count)
    assert whole(new, one.order) == whole(new, other)


@given(backwards(), st.booleans(), st.lists(st.integers(0, 8), max_size=12))
def test_a_backward_after_a_restart_is_like_the_first(
    first: Backward, in_turn: bool, second: list[int]
) -> None:
    new = Buckets(count=first.count, in_turn=in_turn)
    left, _ = run(new, first.order)
    assert restart(left) == new
    order = [bucket for bucket in second if bucket < first.count]
    assert run(restart(left), order) == run(new, order)


@given(backwards(), st.booleans())
def test_what_fills_again_changes_nothing(backward: Backward, in_turn: bool) -> None:
    s, _ = run(Buckets(count=backward.count, in_turn=in_turn), backward.order)
    for bucket in backward.order:
        assert filled(s, bucket) == (s, ())


@pytest.mark.parametrize("in_turn", [True, False])
def test_what_came_late_stays_behind_when_the_backward_ends(in_turn: bool) -> None:
    s, launched = run(Buckets(count=2, in_turn=in_turn), [0, 0])
    assert launched == [[0], []]
    assert flat(finish(s, frozenset({0, 1}))[1]) == [1]


@pytest.mark.parametrize("in_turn", [True, False])
def test_without_buckets_there_is_nothing_to_launch(in_turn: bool) -> None:
    s = Buckets(count=0, in_turn=in_turn)
    assert finish(s) == (s, ())


def test_ten_thousand_buckets_in_the_worst_order_go_in_one_launch() -> None:
    count = 10_000
    s, launched = run(Buckets(count=count), range(count - 1, -1, -1))
    assert launched == [[]] * (count - 1) + [list(range(count))]
    assert (s.turn, s.full) == (count, 0)
