"""Digests are those of the whole, however it is cut, and change with every bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.tools.record.digests import (
    digested_leaves,
    digests_of,
    of_leaves,
    places,
    places_of,
    words,
)
from tests.strategies import seeds, stages

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool)


def some(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    raw = torch.randint(0, 2, (numel * dtype.itemsize * 8,),
                        generator=torch.Generator().manual_seed(seed))  # fmt: skip
    if dtype is torch.bool:
        return raw[:numel].bool()
    octets = (raw.view(-1, 8) * 2 ** torch.arange(8)).sum(1).to(torch.uint8)
    return octets.view(dtype)


@given(st.data(), st.integers(0, 17), st.sampled_from(DTYPES), seeds, st.integers(0, 3))
def test_parts_add_up_to_the_whole_and_each_bit_counts(
    data: Any, numel: int, dtype: torch.dtype, seed: int, offset: int
) -> None:
    x = some(numel + offset, dtype, seed)[offset:]  # which begins anywhere in memory
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=3)))
    ends = [0, *cuts, numel]
    for digest in (words, places):
        parts = [digest(x[a:b], a) for a, b in itertools.pairwise(ends)]
        assert torch.equal(torch.stack(parts).sum(), digest(x.clone(), 0))
    if numel and dtype is not torch.bool:
        other = x.clone()
        octet = data.draw(st.integers(0, x.nbytes - 1))
        other.view(torch.uint8)[octet] ^= 1 << data.draw(st.integers(0, 7))
        assert not torch.equal(words(x, 0), words(other, 0))
        assert not torch.equal(places(x, 0), places(other, 0))


def test_elements_in_other_places_show_in_the_second_digest() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert not torch.equal(places(x.flatten(), 0), places(x.T.flatten(), 0))
    zeros_and_ones = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert torch.equal(words(zeros_and_ones, 0), words(zeros_and_ones.roll(2), 0))
    assert not torch.equal(places(zeros_and_ones, 0), places(zeros_and_ones.roll(2), 0))


@given(stages, stages, st.integers(1, 4), st.integers(1, 4))
def test_a_state_has_the_same_digests_at_every_stage_and_world(
    stage: int, other: int, ranks: int, others: int
) -> None:
    params = {"a": torch.randn(3, 5), "b": torch.randn(()), "c": torch.randn(7).bfloat16()}

    def digests(stage: int, ranks: int) -> dict[str, tuple[int, ...]]:
        def body() -> Any:
            state = fzero.init(params, fzero.optim.adam(0.1), stage=stage)
            rank = fzero.axis_index()
            rows = torch.stack(
                [digests_of(state, places_of(state, rank), f) for f in (words, places)]
            )
            kept.append((digested_leaves(state), state.setup.layout.ranks))
            return rows

        kept: list[Any] = []
        rows = fzero.simulate(body, world_size=ranks)()
        leaves, shards = kept[0]
        both = [of_leaves(leaves, rows[:, i], shards).tolist() for i in range(2)]
        return {leaf.name: pair for leaf, pair in zip(leaves, zip(*both, strict=True), strict=True)}

    assert digests(stage, ranks) == digests(other, others)


@pytest.mark.parametrize("digest", [words, places])
def test_two_leaves_that_changed_places_show(digest: Any) -> None:
    def of(a: float, b: float) -> list[int]:
        params = {"a": torch.full((4,), a), "b": torch.full((4,), b)}
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=0)
        return digests_of(state, places_of(state, 0), digest).tolist()

    assert of(1.0, 2.0) != of(2.0, 1.0)
