"""Which number of a leaf differs most, on which ranks; and which sums no order changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.tools.rounding import (
    Copy,
    Found,
    Spread,
    first_apart,
    is_exact,
    replicas_apart,
    whole_leaf,
)

NAN, INF = torch.nan, torch.inf


def leaf(*parts: tuple[int, int, list[float]]) -> Spread:
    """A leaf [2, 3] with parts (rank, start, values)."""
    return Spread((2, 3), tuple(Copy(r, k, torch.tensor(x).double()) for r, k, x in parts))


ONES = leaf((0, 0, [1.0] * 3), (1, 3, [1.0] * 3))
DRIFTED = leaf((0, 0, [1.0] * 3), (1, 3, [1.0] * 3), (2, 3, [1.0, 5.0, 1.0]))
FAR = Found((2,), (1, 1), 1.0, 5.0, 0.5)


@pytest.mark.parametrize(
    ("a", "b", "bound", "found"),
    [
        (ONES, ONES, 0.0, None),
        (ONES, DRIFTED, 4.0, None),
        (ONES, DRIFTED, 0.5, FAR),
        (DRIFTED, ONES, 0.5, FAR._replace(a=5.0, b=1.0)),
        # the element that is furthest over its own bound
        (
            leaf((0, 0, [0.0] * 6)),
            leaf((0, 0, [9.0, 3.0, 0.0, 0.0, 0.0, 0.0])),
            torch.tensor([8.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
            Found((0,), (0, 1), 0.0, 3.0, 1.0),
        ),
        # infinities and NaN: on both sides they are alike
        (leaf((0, 0, [NAN, INF, 1, 1, 1, 1])), leaf((0, 0, [NAN, INF, 1, 1, 1, 1])), 0.0, None),
        (leaf((0, 0, [INF, 1, 1, 1, 1, 1])), leaf((0, 0, [-INF, 1, 1, 1, 1, 1])), NAN, "differ"),
        (leaf((0, 0, [NAN, 1, 1, 1, 1, 1])), leaf((0, 0, [1.0] * 6)), 1e9, "differ"),
        (leaf((0, 0, [1.0] * 6)), leaf((0, 0, [NAN, 1, 1, 1, 1, 1])), 1e9, "differ"),
    ],
)
def test_where_two_leaves_differ(
    a: Spread, b: Spread, bound: Tensor | float, found: Found | str | None
) -> None:
    seen = first_apart(a, b, bound)
    if found == "differ":
        assert seen is not None and seen.index == (0, 0) and seen.ranks == (0,)
    else:
        assert seen == found


def test_replicas_differ_by_a_bit_from_the_lowest_rank_that_has_them() -> None:
    assert replicas_apart(ONES) is None
    assert replicas_apart(DRIFTED) == FAR._replace(bound=0.0)
    assert first_apart(whole_leaf(torch.zeros(0)), whole_leaf(torch.ones(0)), 0.0) is None
    scalar = first_apart(whole_leaf(torch.zeros(())), whole_leaf(torch.ones(()), 3), 0.5)
    assert scalar == Found((3,), (), 0.0, 1.0, 0.5)


@given(st.permutations(range(5)), st.lists(st.integers(-64, 64), min_size=5, max_size=5))
def test_a_sum_that_is_called_exact_has_one_value_in_every_order(
    order: Sequence[int], numbers: list[int]
) -> None:
    terms = [torch.tensor([number / 8, number * 1.0]) for number in numbers]
    assert is_exact(terms, 4, torch.float32)
    parts = [terms[i] / 4 for i in order]
    assert torch.equal(torch.stack(terms).double().sum(0) / 4, sum(parts[1:], parts[0]).double())


@pytest.mark.parametrize(
    ("numbers", "divisor", "dtype"),
    [
        ([1 / 3, 1.0], 1, torch.float64),  # uses all bits
        ([1.0, 2.0], 3, torch.float64),  # 1 / 3
        ([2.0**40, 2.0**-20], 1, torch.float64),
        ([100.0, 1.0], 1, torch.bfloat16),
        ([1.0, torch.inf], 1, torch.float64),
        ([0.0, 5e-324], 1, torch.float64),
    ],
)
def test_a_sum_that_rounds_is_not_called_exact(
    numbers: list[float], divisor: int, dtype: torch.dtype
) -> None:
    assert not is_exact([torch.tensor([x], dtype=torch.float64) for x in numbers], divisor, dtype)
    assert is_exact([torch.zeros(2), torch.zeros(2)], divisor, dtype)


def test_the_older_name_of_a_difference_of_a_cell_still_works() -> None:
    assert fzero.certify.__name__ == "certify"  # the function has the name of its package
    from fzero.tools.certify import CellDifference, Difference

    assert Difference is CellDifference is not fzero.tools.Difference
