"""Owners of parameters: balanced by cost, the same on every rank, exchanged in bounded batches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.machine.owners import BATCH_NUMEL, OwnedLeaf, assign, batches_of, cost_of
from fzero.state import Leaf

shapes = st.lists(st.integers(1, 5000), max_size=4).map(tuple)


@given(st.lists(shapes, max_size=30), st.integers(1, 9))
def test_the_busiest_owner_has_little_more_than_the_mean(
    sizes: list[tuple[int, ...]], ranks: int
) -> None:
    costs = [cost_of(shape) for shape in sizes]
    owners = assign(costs, ranks)
    load = [
        sum(c for c, r in zip(costs, owners, strict=True) if r == rank) for rank in range(ranks)
    ]
    assert max(load) <= sum(costs) / ranks + (1 - 1 / ranks) * max(costs, default=0)
    assert sum(load) == sum(costs)


@given(st.lists(st.tuples(shapes, st.integers(0, 10**9)), max_size=30), st.integers(1, 9))
def test_what_they_keep_is_shared_as_what_they_compute(
    some: list[tuple[tuple[int, ...], int]], ranks: int
) -> None:
    """A rank that takes one has no more than the mean of both shares together before it."""
    costs, kept = [cost_of(shape) for shape, _ in some], [k for _, k in some]
    owners = assign(costs, ranks, kept)
    for sizes in (costs, kept):
        load = [sum(x for x, r in zip(sizes, owners, strict=True) if r == n) for n in range(ranks)]
        shares = [max(c / (sum(costs) or 1), k / (sum(kept) or 1)) for c, k in zip(costs, kept,
                  strict=True)]  # fmt: skip
        bound = 2 / ranks + max(shares, default=0)
        assert max(load) / (sum(sizes) or 1) <= bound + 1e-9


@given(st.lists(st.tuples(st.integers(1, BATCH_NUMEL), st.integers(0, 3)), max_size=20))
def test_batches_have_each_parameter_once_and_are_bounded(some: list[tuple[int, int]]) -> None:
    leaves = [
        OwnedLeaf(
            leaf=Leaf(path=str(i), shape=(n,), dtype=torch.float32, trainable=True),
            index=i,
            position=0,
            offset=0,
            owner=owner,
        )
        for i, (n, owner) in enumerate(some)
    ]
    batches = [*batches_of(leaves, 4)]
    assert sorted(k for batch in batches for k in batch) == [*range(len(leaves))]
    for batch in batches:
        for rank in range(4):
            held = [leaves[k].leaf.numel for k in batch if leaves[k].owner == rank]
            assert len(held) < 2 or sum(held) <= BATCH_NUMEL
