"""A pytree -> flat padded groups -> shards -> the same pytree, whatever the pytree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from fzero.errors import LayoutError
from fzero.machine.packing import input_shape, pack, pack_copied, unpack, unpack_groups
from fzero.machine.partition import assemble, leaves_of, plan_layout, shard_of, unit_of
from fzero.state.layout import Layout
from tests.strategies import (
    LEARNING,
    Block,
    Pair,
    integers,
    learns,
    many,
    same,
    tensors,
    trees,
    unique,
    worlds,
)

buckets = st.none() | st.integers(1, 300)
any_tree = given(tree=trees(empty=True), ranks=worlds, bucket_bytes=buckets)


def flatten(layout: Layout, params: Any) -> list[Tensor]:
    """One flat [W l] for each group, as `init` makes them."""
    by_leaf = leaves_of(layout, params)
    return [pack(layout, i, [by_leaf[j] for j in g.leaves]) for i, g in enumerate(layout.groups)]


def unflatten(layout: Layout, flats: Sequence[Tensor]) -> Any:
    """The pytree of full flats, as `full_params` makes it."""
    return assemble(layout, unpack_groups(layout, dict(enumerate(flats))))


def ties(tree: Any) -> list[int]:
    """For each leaf, the first position that holds the same tensor."""
    seen = [id(leaf) for leaf in tensors(tree)]
    return [seen.index(key) for key in seen]


@any_tree
def test_unshard_after_shard_is_the_identity(
    tree: Any, ranks: int, bucket_bytes: int | None
) -> None:
    layout = plan_layout(tree, ranks=ranks, bucket_bytes=bucket_bytes)
    flats = flatten(layout, tree)
    shards = [[shard_of(flat, ranks, rank).clone() for flat in flats] for rank in range(ranks)]
    back = unflatten(layout, [torch.cat(rows) for rows in zip(*shards, strict=True)])
    same(back, tree)
    assert ties(back) == ties(tree)


@any_tree
def test_every_tensor_is_stored_once_in_a_group_of_its_kind(
    tree: Any, ranks: int, bucket_bytes: int | None
) -> None:
    layout = plan_layout(tree, ranks=ranks, bucket_bytes=bucket_bytes)
    assert [leaf.shape for leaf in layout.leaves] == [tuple(x.shape) for x in unique(tree)]
    assert [leaf.trainable for leaf in layout.leaves] == [learns(x) for x in unique(tree)]
    stored = [leaf for group in layout.groups for leaf in group.leaves]
    assert sorted(stored) == list(range(len(layout.leaves)))
    for group in layout.groups:
        for leaf in (layout.leaves[i] for i in group.leaves):
            assert (leaf.dtype, leaf.trainable) == (group.dtype, group.trainable)


@any_tree
def test_leaves_and_shards_start_on_16_bytes_and_padding_is_zero_and_no_more_than_that(
    tree: Any, ranks: int, bucket_bytes: int | None
) -> None:
    layout = plan_layout(tree, ranks=ranks, bucket_bytes=bucket_bytes)
    for index, (group, flat) in enumerate(zip(layout.groups, flatten(layout, tree), strict=True)):
        numels = [layout.leaves[i].numel for i in group.leaves]
        assert flat.shape == (layout.full_numel(index),) == (ranks * group.shard_numel,)
        padded = (flat.numel() - sum(numels)) * flat.itemsize
        least = 16 * (len(numels) + (ranks if ranks > 1 else 0))
        assert 0 <= padded < least
        rest = torch.ones(flat.shape, dtype=torch.bool)
        for offset, numel in zip(group.offsets, numels, strict=True):
            rest[offset : offset + numel] = False
        assert not flat.detach()[rest].any()
        held = flat.detach().clone()
        shards = [shard_of(held, ranks, rank) for rank in range(ranks)]
        for x in (*unpack(layout, index, held), *shards):
            assert x.data_ptr() % 16 == 0 or not x.numel()


@given(tree=trees(empty=True), ranks=many, bucket_bytes=st.integers(1, 300))
def test_buckets_are_full_but_not_too_full(tree: Any, ranks: int, bucket_bytes: int) -> None:
    layout = plan_layout(tree, ranks=ranks, bucket_bytes=bucket_bytes)

    def size(members: Sequence[int]) -> int:
        return sum(layout.leaves[i].numel * layout.leaves[i].dtype.itemsize for i in members)

    for group in layout.groups:
        assert size(group.leaves) <= bucket_bytes or size(group.leaves[:-1]) == 0
    for a, b in pairwise(layout.groups):
        if (a.dtype, a.trainable) == (b.dtype, b.trainable):
            assert size(a.leaves) + size(b.leaves[:1]) > bucket_bytes


@given(tree=trees(empty=True), ranks=many)
def test_at_stage_3_a_unit_is_a_group_and_on_one_rank_a_leaf_is(tree: Any, ranks: int) -> None:
    by_unit = plan_layout(tree, ranks=ranks)
    keys = [(unit_of(leaf.path), leaf.dtype, leaf.trainable) for leaf in by_unit.leaves]
    assert len(by_unit.groups) == len(set(keys))
    for group in by_unit.groups:
        assert {keys[i][0] for i in group.leaves} == {group.name}
    assert [group.leaves for group in plan_layout(tree, ranks=1).groups] == [
        (i,) for i in range(len(by_unit.leaves))
    ]


def test_units_and_what_learns_can_be_chosen_by_the_path() -> None:
    params = {"enc": [torch.ones(2), torch.ones(3)], "dec": torch.ones(1)}
    layout = plan_layout(
        params,
        ranks=2,
        unit=lambda path: path.split(".")[0],
        trainable=lambda path: path != "dec",
    )
    assert [(group.name, group.leaves, group.trainable) for group in layout.groups] == [
        ("enc", (0, 1), True),
        ("dec", (2,), False),
    ]


def test_leaves_come_in_the_order_of_their_dict_and_are_named_by_keys_indices_and_fields() -> None:
    layers = {f"layers.{n}.w": torch.ones(n) for n in range(1, 12)}
    block = Block(weight=torch.ones(2), bias=torch.ones(3))
    params = {"blocks": layers, "a": [Pair(torch.ones(1), None), block]}
    layout = plan_layout(params, ranks=2)
    assert [leaf.path for leaf in layout.leaves] == [
        *(f"blocks.{path}" for path in layers),
        "a.0.first",
        "a.1.weight",
        "a.1.bias",
    ]
    again = unflatten(layout, flatten(layout, {"a": params["a"], "blocks": layers}))
    assert all(torch.equal(again["blocks"][path], layer) for path, layer in layers.items())
    assert [leaf.path for leaf in plan_layout(torch.ones(2), ranks=2).leaves] == ["."]


def test_tied_means_the_same_tensor_or_the_same_memory() -> None:
    w = torch.ones(2, 3)
    params = {
        "a": w,
        "b": w.detach(),
        "c": Parameter(w),
        "other_shape": w.view(3, 2),
        "transposed": w.t(),
        "copy": w.clone(),
        "none": torch.empty(0),
        "also_none": torch.empty(0),
    }
    slots = dict(zip(sorted(params), plan_layout(params, ranks=2).slots, strict=True))
    assert slots["a"] == slots["b"] == slots["c"]
    assert len(set(slots.values())) == len(params) - 2


@given(
    tree=trees(LEARNING, frozen=False, empty=True),
    ranks=worlds,
    bucket_bytes=buckets,
    unused=st.integers(0, 6),
)
def test_unflatten_and_flatten_are_adjoint_and_the_fast_ways_agree(
    tree: Any, ranks: int, bucket_bytes: int | None, unused: int
) -> None:
    layout = plan_layout(tree, ranks=ranks, bucket_bytes=bucket_bytes)
    for index, flat in enumerate(flatten(layout, tree)):
        apart: list[Any] = unpack(layout, index, flat.detach())
        same(pack(layout, index, apart), flat)
        same(pack_copied(layout, index, apart), flat)
        divided = pack_copied(layout, index, apart, divisor=4.0)
        same(divided, flat / 4)
        memories = {x.untyped_storage().data_ptr() for x in apart if x.numel()}
        assert divided.untyped_storage().data_ptr() not in memories
        dys = [integers(x.shape, i, x.dtype) for i, x in enumerate(apart)]
        want = pack(layout, index, dys)
        by = flat.detach().clone().view(input_shape(layout, index)).requires_grad_()
        same(torch.autograd.grad(unpack(layout, index, by), by, dys)[0].reshape(-1), want)
        if len(apart) > 1:  # a leaf without a gradient is packed as zeros
            hole = unused % len(apart)
            zeros = [torch.zeros_like(x) if i == hole else x for i, x in enumerate(apart)]
            apart[hole] = None
            same(pack_copied(layout, index, apart), pack(layout, index, zeros))


@given(tree=trees(empty=True), ranks=many)
def test_a_layout_is_equal_on_every_rank_and_hashable(tree: Any, ranks: int) -> None:
    one, other = plan_layout(tree, ranks=ranks), plan_layout(tree, ranks=ranks)
    assert one == other
    assert hash(one) == hash(other)
    assert one.describe() == other.describe()
    assert one != plan_layout(tree, ranks=ranks + 1)


@pytest.mark.parametrize(
    ("leaf", "seen"),
    [
        (3.0, "is a float, not a tensor"),
        (torch.eye(2).to_sparse(), "is a torch.sparse_coo tensor"),
    ],
)
def test_a_leaf_that_is_no_dense_tensor_is_named(leaf: Any, seen: str) -> None:
    with pytest.raises(LayoutError, match=rf"layers\.1 {seen}[\s\S]*Fix: give it to the loss"):
        plan_layout({"layers": [torch.ones(1), leaf]}, ranks=2)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_of_16_bits_are_refused() -> None:
    with pytest.raises(LayoutError, match="w is a complex tensor of 16 bits"):
        plan_layout({"w": torch.ones(2, dtype=torch.complex32)}, ranks=2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [None, 40])
def test_complex_leaves_are_packed_by_their_real_views_and_come_back(
    ranks: int, bucket_bytes: int | None
) -> None:
    z = torch.randn(3, 5, dtype=torch.complex64)
    tree = {
        "a": z.conj(),
        "b": torch.randn(4),
        "c": torch.randn((), dtype=torch.complex128),
        "d": z.mT,
        "e": torch.zeros(0, 2, dtype=torch.complex64),
    }
    layout = plan_layout(tree, ranks=ranks, bucket_bytes=bucket_bytes)
    given = leaves_of(layout, tree)
    for index, group in enumerate(layout.groups):
        flat = pack(layout, index, [given[i] for i in group.leaves])
        assert flat.dtype is group.dtype and not flat.is_complex()
        assert group.shard_numel % (16 // flat.itemsize) == 0 or ranks == 1
        for i, leaf in zip(group.leaves, unpack(layout, index, flat), strict=True):
            assert leaf.dtype is given[i].dtype and torch.equal(leaf, given[i])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"v": torch.ones(2)}, r"has the structure[\s\S]*Fix: pass a pytree of the same structure"),
        ({"w": torch.ones(3)}, r"w is \(3,\) torch.float32, the layout has \(2,\)[\s\S]*Fix: "),
        ({"w": torch.ones(2).double()}, r"w is \(2,\) torch.float64[\s\S]*Fix: convert them"),
    ],
)
def test_params_of_another_model_are_refused(other: Any, message: str) -> None:
    layout = plan_layout({"w": torch.ones(2)}, ranks=2, bucket_bytes=100)
    with pytest.raises(LayoutError, match=message):
        flatten(layout, other)
