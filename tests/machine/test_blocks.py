"""A layout of blocks: leaves and parts of flats are whole blocks, whatever the ranks."""

from __future__ import annotations

from math import lcm
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.machine.packing import leaf_ranges, part_of
from fzero.machine.partition import plan_layout, regrouped
from fzero.state.layout import BLOCK, Layout, Part
from tests.machine.test_partition import flatten, unflatten
from tests.strategies import same, trees


class Cut(NamedTuple):
    """Into how many parts a flat is cut, and of what its leaves and parts consist."""

    ranks: int
    replicas: int
    block: int
    bucket_bytes: int | None

    def layout(self, tree: Any) -> Layout:
        return plan_layout(
            tree,
            ranks=self.ranks,
            replicas=self.replicas,
            bucket_bytes=self.bucket_bytes,
            block=self.block,
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """The parts of a flat at each placement: REPLICATED, SHARDED, OVER_ALL."""
        return 1, self.ranks, self.ranks * self.replicas


cuts = st.builds(
    Cut,
    ranks=st.integers(1, 4),
    replicas=st.integers(1, 3),
    block=st.sampled_from([BLOCK, lcm(BLOCK, 96)]),  # alone, and with the block of a codec
    bucket_bytes=st.none() | st.integers(1, 2000),
)


@given(tree=trees(empty=True), cut=cuts)
def test_leaves_start_and_parts_start_and_end_on_whole_blocks(tree: Any, cut: Cut) -> None:
    layout = cut.layout(tree)
    assert layout.options.block == cut.block
    for index, group in enumerate(layout.groups):
        assert all(offset % cut.block == 0 for offset in group.offsets)
        for count in cut.counts:
            assert layout.full_numel(index) % (count * cut.block) == 0
        # No more padding than that takes.
        stored = sum(-(-layout.leaves[i].numel // cut.block) for i in group.leaves)
        assert layout.full_numel(index) < (stored + cut.counts[-1]) * cut.block


@given(tree=trees(empty=True), cut=cuts)
def test_a_block_of_a_leaf_has_the_same_elements_on_any_ranks(tree: Any, cut: Cut) -> None:
    """A rank has whole blocks of a leaf, and those of all ranks are all of them, once."""
    layout = cut.layout(tree)
    for count in cut.counts:
        found: dict[int, list[int]] = {}
        for index in range(len(layout.groups)):
            for number in range(count):
                for one in leaf_ranges(layout, index, Part(count, number)):
                    assert one.at % cut.block == one.start % cut.block == 0
                    ends = one.stop == layout.leaves[one.leaf].numel
                    assert ends or one.stop % cut.block == 0
                    found.setdefault(one.leaf, []).extend(range(one.start, one.stop))
        for i, leaf in enumerate(layout.leaves):
            assert found.get(i, []) == list(range(leaf.numel))


@given(tree=trees(empty=True), cut=cuts)
def test_unshard_after_shard_is_the_identity_and_padding_is_zero(tree: Any, cut: Cut) -> None:
    layout = cut.layout(tree)
    flats = flatten(layout, tree)
    for count in cut.counts:
        rows = [
            [part_of(flat, Part(1, 0), Part(count, k)).clone() for k in range(count)]
            for flat in flats
        ]
        same(unflatten(layout, [torch.cat(row) for row in rows]), tree)
    for index, (group, flat) in enumerate(zip(layout.groups, flats, strict=True)):
        rest = torch.ones(layout.full_numel(index), dtype=torch.bool)
        for leaf, offset in zip(group.leaves, group.offsets, strict=True):
            rest[offset : offset + layout.leaves[leaf].numel] = False
        assert not flat.detach()[rest].any()


@given(tree=trees(empty=True), cut=cuts)
def test_other_ranks_have_the_blocks_that_were_asked_for(tree: Any, cut: Cut) -> None:
    moved = regrouped(cut.layout(tree), ranks=2, bucket_bytes=99, block=cut.block)
    again = plan_layout(tree, ranks=2, bucket_bytes=99, block=cut.block)
    assert (moved, moved.options.block) == (again, cut.block)


@given(tree=trees(empty=True), ranks=st.integers(1, 4))
def test_without_blocks_a_leaf_on_one_rank_is_not_padded(tree: Any, ranks: int) -> None:
    layout = plan_layout(tree, ranks=ranks)
    assert layout.options.block == 1
    if ranks == 1:
        sizes = [layout.full_numel(index) for index in range(len(layout.groups))]
        assert sizes == [leaf.numel for leaf in layout.leaves]
