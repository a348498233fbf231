"""The fixed binary tree: its shape against the plain definition, and sums of any runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.errors import LayoutError
from fzero.state.logical import Node, fold, nodes, push

sizes = st.integers(1, 200)


def _cut(start: int, stop: int) -> int:
    power = 1
    while power * 2 < stop - start:
        power *= 2
    return start + power


def _all_nodes(start: int, stop: int) -> set[Node]:
    if stop - start < 2:
        return {(start, stop)}
    middle = _cut(start, stop)
    return {(start, stop)} | _all_nodes(start, middle) | _all_nodes(middle, stop)


def _total(start: int, stop: int) -> str:
    """The sum of a node as a formula, by the plain definition."""
    if stop - start < 2:
        return f"x{start}"
    middle = _cut(start, stop)
    return f"({_total(start, middle)}+{_total(middle, stop)})"


def _plus(a: str, b: str) -> str:
    return f"({a}+{b})"


def _pushed(start: int, stop: int, places: int, add: Callable[[str, str], str] = _plus):
    held: tuple[tuple[Node, str], ...] = ()
    for place in range(start, stop):
        held = push(held, (place, place + 1), f"x{place}", places, add)
    return held


@given(st.data(), sizes)
def test_a_run_is_a_few_nodes_of_the_tree(data: st.DataObject, places: int) -> None:
    start = data.draw(st.integers(0, places))
    stop = data.draw(st.integers(start, places))
    found = nodes(start, stop, places)
    assert [place for node in found for place in range(*node)] == list(range(start, stop))
    assert set(found) <= _all_nodes(0, places)
    assert len(found) <= max(1, 2 * log2(places))
    for left, right in pairwise(found):  # no two of them are one
        assert (left[0], right[1]) not in _all_nodes(0, places)


@given(st.data(), sizes)
def test_values_that_come_one_after_another_are_held_as_nodes(
    data: st.DataObject, places: int
) -> None:
    start = data.draw(st.integers(0, places))
    stop = data.draw(st.integers(start, places))
    held = _pushed(start, stop, places)
    assert tuple(node for node, _ in held) == nodes(start, stop, places)
    assert [value for _, value in held] == [_total(*node) for node, _ in held]


@given(sizes, st.lists(st.integers(0, 200), max_size=8))
def test_the_total_is_one_formula_whoever_holds_which_run(places: int, edges: list[int]) -> None:
    cuts = sorted({0, places, *(edge % places for edge in edges)})
    values = [one for start, stop in pairwise(cuts) for one in _pushed(start, stop, places)]
    assert fold(values, places, _plus) == _total(0, places)


@pytest.mark.parametrize("there", [[], [(0, 2)], [(0, 2), (3, 4)], [(1, 4)], [(0, 2), (0, 4)]])
def test_places_that_are_missing_or_there_twice_are_no_total(there: list[Node]) -> None:
    with pytest.raises(LayoutError, match="not all of 4 places"):
        fold([(node, "x") for node in there], 4, _plus)
