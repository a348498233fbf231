"""Behaviours 20 and 21: any pytree survives being split, and buckets change no number."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import fzero
from tests.behaviours.networks import (
    STAGES,
    Gpt,
    next_token_loss,
    tokens,
    virtual,
)


class Pair(NamedTuple):
    first: Any
    second: Any


DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)


@st.composite
def leaves(draw: st.DrawFn) -> Tensor:
    """Any size, dtype, stride; a Parameter or not."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = torch.Size(shape).numel()
    value = torch.arange(1, count + 1).view(shape).to(draw(DTYPES))
    if value.ndim > 1 and draw(st.booleans()):
        value = value.transpose(0, 1)
    if value.is_floating_point() and draw(st.booleans()):
        value = Parameter(value, requires_grad=draw(st.booleans()))
    return value


PYTREES = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
        st.tuples(inner, st.none()),
        st.builds(Pair, inner, inner),
        inner.map(lambda tree: {"tied": [tree, tree]}),
    ),
    max_leaves=6,
)


def _has_tensors(tree: Any) -> bool:
    return bool(optree.tree_leaves(tree))


@given(
    tree=PYTREES.filter(_has_tensors),
    ranks=st.integers(1, 7),
    stage=st.sampled_from(STAGES),
    bucket_bytes=st.sampled_from([1, 64, 2**20]),
)
def test_20_shards_hold_the_tree_whatever_it_is(
    tree: Any, ranks: int, stage: int, bucket_bytes: int
) -> None:
    """Also sizes below the world size; each value lies on one rank only at stage 3."""

    def run() -> Any:
        state = fzero.init(tree, fzero.optim.sgd(1.0), stage=stage, bucket_bytes=bucket_bytes)
        whole = fzero.full_params(state)
        assert optree.tree_structure(whole) == optree.tree_structure(tree)
        assert len(state.params.flats) == len(state.setup.layout.groups)
        return whole, len(state.params.flats), sum(flat.numel() for flat in state.params.flats)

    whole, groups, held = virtual(run, ranks)
    wanted = optree.tree_leaves(tree)
    for rows, right in zip(optree.tree_leaves(whole), wanted, strict=True):
        assert rows.dtype == right.dtype
        assert all(torch.equal(row, right) for row in rows)
    stored = {id(leaf): leaf.numel() for leaf in wanted}
    numel = sum(stored.values())
    everywhere = int(held[0]) * (ranks if stage == 3 else 1)
    starts = len(stored) + ranks * int(groups[0])  # of leaves and shards: each on 16 bytes
    assert numel <= everywhere <= numel + 15 * (starts if ranks > 1 else 0)


def test_20_tied_leaves_are_one_and_stay_one() -> None:
    """By object, or by memory; not merely by equal values."""
    w, twin = torch.ones(4), torch.ones(4)
    tree = {"a": w, "view": w.view(4), "part": w[:2], "twin": twin, "again": [w]}
    state = fzero.init(tree, fzero.optim.sgd(1.0), stage=2)
    assert [leaf.path for leaf in state.setup.layout.leaves] == ["a", "part", "twin"]
    whole = fzero.full_params(state)
    assert whole["a"] is whole["view"] is whole["again"][0]
    assert whole["a"] is not whole["twin"]


def test_20_the_layout_is_plain_data() -> None:
    """Comparable, hashable, picklable, equal on every rank."""
    tree = {"a": torch.ones(3), "b": [torch.ones(2, 2)]}
    layouts = [fzero.init(tree, fzero.optim.sgd(1.0), stage=2).setup.layout for _ in range(2)]
    assert layouts[0] == layouts[1]
    assert len(set(layouts)) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_21_buckets_change_no_bit_of_a_gradient(ranks: int) -> None:
    """Sums that round, on virtual ranks, which add in rank order: equal bits for any bucket.

    (On gloo the default sum is its own; there `ordered=True` gives this: see tests/gloo.) The
    update is torch's kernel, whose last bit depends on where in a vector register a number lies.
    """
    apply, params = fzero.functionalize(Gpt(depth=2))
    params = {name: p.float() for name, p in params.items()}
    loss, batch = next_token_loss(apply), tokens(ranks)

    def run(batch: Tensor, stage: int, bucket_bytes: int, units: Any) -> Any:
        state = fzero.init(
            params, fzero.optim.sgd(0.5), stage=stage, bucket_bytes=bucket_bytes, units=units
        )
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(loss, state)(batch)
        return fzero.gradients(state), fzero.full_params(fzero.apply_gradients(state))

    gradients, after = virtual(run, ranks, batch, 0, 2**20, apply.units)
    worlds = [(stage, size, str) for stage in (0, 1, 2) for size in (1, 4 * 7, 2**10, 2**20)]
    worlds += [(3, 1, units) for units in (apply.units, str, lambda path: "all")]
    for stage, size, units in worlds:
        got = virtual(run, ranks, batch, stage, size, units)
        for name in params:
            assert torch.equal(got[0][name], gradients[name]), (stage, size, name)
            torch.testing.assert_close(got[1][name], after[name])


@given(bucket_bytes=st.integers(1, 200), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_21_buckets_are_bounded_unless_one_leaf_is_larger(
    bucket_bytes: int, sizes: list[int]
) -> None:
    params = [torch.zeros(n) for n in sizes]

    def run() -> tuple[()]:
        layout = fzero.init(
            params, fzero.optim.sgd(1.0), stage=2, bucket_bytes=bucket_bytes
        ).setup.layout
        held = [[layout.leaves[i].numel * 4 for i in group.leaves] for group in layout.groups]
        assert sorted(b for bucket in held for b in bucket) == sorted(4 * n for n in sizes)
        for bucket in held:
            assert sum(bucket) <= bucket_bytes or len([b for b in bucket if b]) == 1
        return ()

    virtual(run, 2)
