"""The number of a leaf that differs most: its index in the leaf, and the ranks that have it."""

from __future__ import annotations

import torch

import fzero
from fzero.tools.compare import (
    Copy,
    Found,
    Spread,
    first_apart,
    furthest,
    replicas_apart,
    whole_leaf,
)


def test_the_number_furthest_over_its_own_bound_is_found_at_its_index_in_the_leaf() -> None:
    mine, wanted = torch.tensor([9.0, 3.0, 0.0]).double(), torch.zeros(3).double()
    bound = torch.tensor([8.0, 1.0, 0.0]).double()
    assert furthest(mine, wanted, bound, shape=(2, 3), start=3) == Found((), (1, 1), 0.0, 3.0, 1.0)
    assert furthest(mine, wanted, 9.0, shape=(2, 3), start=3) is None


def test_a_nan_is_over_every_bound_and_in_two_leaves_it_is_alike() -> None:
    nan, zero = torch.tensor([0.0, torch.nan]).double(), torch.zeros(2).double()
    for mine, wanted in ((nan, zero), (zero, nan), (nan, nan)):
        found = furthest(mine, wanted, 1e9, shape=(2,))
        assert found is not None and found.index == (1,)
    assert first_apart(whole_leaf(nan), whole_leaf(nan), 0.0) is None
    assert first_apart(whole_leaf(nan), whole_leaf(zero), 1e9) is not None


def test_the_ranks_that_differ_are_named_and_a_stays_of_the_first_leaf() -> None:
    good = Spread(shape=(4,), copies=(Copy(0, 0, torch.ones(2)), Copy(1, 2, torch.ones(2))))
    copies = (*good.copies, Copy(2, 2, torch.tensor([1.0, 5.0])))
    drifted = Spread(shape=(4,), copies=copies)
    assert first_apart(good, drifted, 0.5) == Found((2,), (3,), 1.0, 5.0, 0.5)
    assert first_apart(drifted, good, 0.5) == Found((2,), (3,), 5.0, 1.0, 0.5)
    assert replicas_apart(good) is None
    assert replicas_apart(drifted) == Found((2,), (3,), 1.0, 5.0, 0.0)


def test_the_older_name_of_a_difference_of_a_cell_still_works() -> None:
    assert fzero.certify.__name__ == "certify"  # the function has the name of its package
    from fzero.tools.certify import CellDifference, Difference

    assert Difference is CellDifference is not fzero.tools.Difference
