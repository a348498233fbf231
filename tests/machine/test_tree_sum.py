"""Sums in one order against the plain definition: bits, at every cut into runs and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.machine.tree_sum import (
    HeldRuns,
    PlaceRun,
    squares_of_blocks,
    sums_in_order,
    sums_of_blocks,
)
from fzero.ranks.mesh import world
from fzero.ranks.virtual import run_ranks
from fzero.state.layout import BLOCK
from fzero.state.logical import fold


def spread(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many sizes: the bits of their sum show in which order it was made."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(numel, generator=generator, dtype=torch.float64).mul(3).exp()
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * sizes).to(dtype)


def in_order(values: Tensor) -> Tensor:
    """The sum of a tree over the values, by the plain definition."""
    places = [((k, k + 1), x) for k, x in enumerate(values)]
    return fold(places, len(places), lambda a, b: a + b)


@st.composite
def cut_items(draw: st.DrawFn) -> tuple[list[int], list[list[PlaceRun]]]:
    """Places of some items, and which runs of them each rank has, as shards of a flat would."""
    places = draw(st.lists(st.integers(1, 70), min_size=1, max_size=6))
    ranks = draw(st.integers(1, 4))
    total = sum(places)
    inner = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    runs: list[list[PlaceRun]] = []
    for low, high in pairwise([0, *inner, total]):
        found, begin = [], 0
        for item, size in enumerate(places):
            start, stop = max(low - begin, 0), min(high - begin, size)
            if start < stop:
                found.append(PlaceRun(item, start, stop))
            begin += size
        runs.append(found)
    return places, runs


@given(cut=cut_items(), gap=st.integers(0, 3), seed=st.integers(0, 99))
def test_sums_have_the_bits_of_the_tree_whoever_has_which_run(
    cut: tuple[list[int], list[list[PlaceRun]]], gap: int, seed: int
) -> None:
    places, runs = cut
    items = [spread(size, seed + k).square() for k, size in enumerate(places)]
    expected = torch.stack([in_order(x) for x in items])

    def body(rank: int) -> tuple[Tensor, Tensor]:
        values, at, length = [torch.full((gap,), torch.nan)], list[int](), gap
        for run in runs[rank]:  # what is between runs is not counted
            values += [items[run.item][run.start : run.stop], torch.full((gap,), torch.nan)]
            at.append(length)
            length += run.stop - run.start + gap
        held = HeldRuns(torch.cat(values), tuple(runs[rank]), tuple(at))
        return sums_in_order(held, [tuple(some) for some in runs], tuple(places), world())

    for by_item, total in run_ranks(body, len(runs)):
        assert torch.equal(by_item, expected)
        assert torch.equal(total, in_order(expected))


def test_without_items_a_sum_is_zero() -> None:
    by_item, total = sums_in_order(HeldRuns(torch.ones(0), (), ()), [()], (), world())
    assert (by_item.tolist(), total.item()) == ([], 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_sum_of_a_block_is_a_function_of_the_block(dtype: torch.dtype, threads: int) -> None:
    x = spread(BLOCK * 5000, dtype=dtype).clamp(-200, 200)
    squares, sums = squares_of_blocks([x]), sums_of_blocks([x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for low, high in [(0, 1), (1, 2), (3, 70), (17, 4999), (1, 514), (0, 5000)]:
            part = x[low * BLOCK : high * BLOCK]
            for given_ in ([part], [part.clone()], part.split(BLOCK * 401)):
                assert torch.equal(squares_of_blocks(given_), squares[low:high])
                assert torch.equal(sums_of_blocks(given_), sums[low:high])
    finally:
        torch.set_num_threads(before)
    exact = x.double().view(-1, BLOCK)
    torch.testing.assert_close(squares.double(), exact.square().sum(1), rtol=1e-5, atol=0)
    scale = exact.abs().sum(1)
    assert ((sums.double() - exact.sum(1)).abs() <= 1e-5 * scale).all()


def test_flats_of_other_dtypes_are_summed_each_in_its_own_precision() -> None:
    flats = [
        spread(BLOCK),
        torch.zeros(0),
        spread(BLOCK, 1, torch.float64),
        spread(BLOCK, 2, torch.bfloat16),
    ]
    together = squares_of_blocks(flats)
    assert together.dtype is torch.float64
    assert torch.equal(
        together, torch.cat([squares_of_blocks([x]).double() for x in flats if len(x)])
    )


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
def test_a_sum_of_minus_zeros_is_zero_wherever_they_are(sizes: Sequence[int]) -> None:
    x = torch.full((4 * BLOCK,), -0.0)
    parts = x.split([size * BLOCK for size in sizes])
    assert not torch.cat([sums_of_blocks([x]), sums_of_blocks(parts)]).signbit().any()
