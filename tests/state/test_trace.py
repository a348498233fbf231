"""The recorded order: what it has, how far away things are in it, and what comes next."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.state.trace import (
    Complete,
    Invalid,
    Order,
    Recording,
    distance_around,
    expected_order,
    expects,
    look_ahead,
    order_of,
    record_use,
    reuse_distance,
    rewind,
)
from fzero.state.units import Limits, Modules, Units, plan_modules, plan_units

LIVE = b"\x02"


def planned(
    numels: list[int], needs: list[list[int]], persistent: int = 0
) -> tuple[Units, Modules]:
    """Units u0, u1, ... and modules m0, m1, ...; units of `persistent` elements or fewer stay."""
    limits = Limits(persistence_threshold_numel=persistent)
    units = plan_units({f"u{i}": numel for i, numel in enumerate(numels)}, limits)
    return units, plan_modules(
        units, {f"m{i}": [f"u{unit}" for unit in ids] for i, ids in enumerate(needs)}
    )


def order(used: list[int], numels: list[int], needs: list[list[int]]) -> Order:
    units, modules = planned(numels, needs)
    return order_of(used, modules, units)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_a_recording_keeps_every_use_in_order(count: int) -> None:
    trace = Recording()
    for module in range(count):
        trace = record_use(trace, module)
    assert trace.modules == tuple(range(count))
    assert len(trace.last) < 256  # one more use copies a page, not the step


def test_what_does_not_move_has_no_place() -> None:
    units, modules = planned([1, 5, 6], [[], [0], [0, 1], [2]], persistent=1)
    found = order_of([0, 1, 2, 0, 3, 2], modules, units)
    assert found.modules == (2, 3, 2)
    assert found.needs == ((1,), (2,), (1,))
    assert found.before_numel == (0, 5, 11, 16)
    assert found.uses == ((), (0, 2), (1,))


def test_a_complete_order_cannot_be_changed() -> None:
    found = order([0, 0], [1], [[0]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.modules = ()
    followed, _ = look_ahead(Complete(order=found), LIVE, (1,), 9)
    assert followed.order is found
    assert rewind(followed, [0]).order is found
    assert hash(found) == hash(order([0, 0], [1], [[0]]))


@pytest.mark.parametrize(
    ("position", "module", "expected"),
    [(0, 0, True), (0, 1, False), (1, 1, True), (2, 0, False), (2, 1, False)],
)
def test_the_order_expects_one_module_at_each_place(
    position: int, module: int, expected: bool
) -> None:
    trace = Complete(order=order([0, 1], [1, 1], [[0], [1]]), position=position)
    assert expects(trace, module) is expected


@given(
    numels=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    used=st.lists(st.integers(0, 3), max_size=12),
    position=st.integers(0, 12),
    unit=st.integers(0, 2),
)
def test_the_distance_is_what_the_entries_before_the_next_use_use(
    numels: list[int], used: list[int], position: int, unit: int
) -> None:
    needs = [[0], [1], [0, 2], [2, 1]]
    position = min(position, len(used))
    trace = Complete(order=order(used, numels, needs), position=position)
    rest = [needs[module] for module in used[position:]]
    before = next((rest[:i] for i, ids in enumerate(rest) if unit in ids), None)
    wanted = math.inf if before is None else sum(numels[u] for ids in before for u in ids)
    assert reuse_distance(trace, unit) == wanted
    assert reuse_distance(Invalid(), unit) == reuse_distance(Recording(), unit) == math.inf


@given(
    numels=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    used=st.lists(st.integers(0, 3), max_size=12),
    position=st.integers(0, 12),
    unit=st.integers(0, 2),
)
def test_the_distance_around_is_that_in_an_order_that_comes_twice(
    numels: list[int], used: list[int], position: int, unit: int
) -> None:
    needs = [[0], [1], [0, 2], [2, 1]]
    position = min(position, len(used))
    once = Complete(order=order(used, numels, needs), position=position)
    twice = Complete(order=order([*used, *used], numels, needs), position=position)
    assert distance_around(once, unit) == reuse_distance(twice, unit)
    assert distance_around(Invalid(), unit) == distance_around(Recording(), unit) == math.inf


@pytest.mark.parametrize(
    ("live", "room", "ahead", "cursor"),
    [
        ([0, 0, 0], 99, (0, 1, 2), 4),
        ([0, 0, 0], 3, (0, 1), 2),
        ([0, 0, 0], 2, (0,), 1),
        ([0, 0, 0], 0, (), 0),
        ([0, 0, 0], -5, (), 0),
        ([2, 0, 0], 2, (1,), 2),  # place 2 uses unit 2, which does not fit any more
        ([2, 1, 0], 3, (), 2),
        ([2, 1, 0], 4, (2,), 4),
        ([1, 2, 6], 0, (), 4),
    ],
)
def test_looking_ahead_takes_what_is_not_live_in_order_while_it_fits(
    live: list[int], room: int, ahead: tuple[int, ...], cursor: int
) -> None:
    trace = Complete(order=order([0, 1, 3, 2], [1, 2, 4], [[0], [1], [2], [0, 2]]))
    assert look_ahead(trace, bytes(live), (1, 2, 4), room) == (
        dataclasses.replace(trace, cursor=cursor),
        ahead,
    )


def test_freeing_takes_the_cursor_back_to_the_next_use() -> None:
    trace = Complete(order=order([0, 1, 0, 1], [1, 1], [[0], [1]]), position=1, cursor=4)
    assert rewind(trace, []) is trace
    assert rewind(trace, [0]).cursor == 2
    assert rewind(trace, [0, 1]).cursor == 1
    assert rewind(dataclasses.replace(trace, position=3), [0]).cursor == 4
    assert rewind(Invalid(), [0]) == Invalid()


def test_following_a_step_looks_at_every_entry_about_once() -> None:
    class Counted(bytes):
        looked = 0

        def __getitem__(self, index):
            Counted.looked += 1
            return super().__getitem__(index)

    count = 500
    used = [*range(count), *reversed(range(count))]
    trace = Complete(order=order(used, [1] * count, [[unit] for unit in range(count)]))
    for position in range(1, len(used) + 1):
        trace = dataclasses.replace(trace, position=position)
        trace, ahead = look_ahead(trace, Counted(LIVE * count), [1] * count, 9)
        assert ahead == ()
    assert Counted.looked == len(used)


def test_ranks_compare_lines_that_name_modules_and_units() -> None:
    units, modules = planned([3, 8], [[0, 1], [1]])
    named = Modules(names=("", "head"), needs=modules.needs)
    lines = expected_order(order_of([1, 0], named, units), named, units)
    assert lines == ["0: head uses u1 (8)", "1: (root) uses u0 (3), u1 (8)"]
