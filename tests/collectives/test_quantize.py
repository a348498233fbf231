"""int8 blocks: the bound of their error, their bytes, and what error feedback makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.collectives.quantize import BLOCK, dequantized, quantized, sum_of, wire_numel
from tests.covering import covered
from tests.strategies import seeds

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
sizes = st.sampled_from([0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])


def received(x: Tensor) -> Tensor:
    return dequantized(quantized(x), x.shape[-1], x.dtype)


def blocks_of(x: Tensor) -> list[Tensor]:
    return list(x.split(BLOCK)) if x.numel() else []


@given(sizes, st.integers(-30, 30), st.sampled_from(DTYPES), seeds)
def test_an_element_comes_back_to_within_1_in_254_of_the_largest_of_its_block(
    size: int, power: int, dtype: torch.dtype, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    low = max(power, -10) if dtype is torch.float16 else power
    values = torch.randn(size, generator=source, dtype=torch.float64) * 2.0 ** min(low, 10)
    values[: size // 3] = 0.0
    x = values.to(dtype)
    found = received(x)
    assert found.dtype is dtype and found.shape == x.shape
    for mine, theirs in zip(blocks_of(found.double()), blocks_of(x.double()), strict=True):
        largest = theirs.abs().max()
        rounding = torch.finfo(dtype).eps if dtype in DTYPES[2:] else 1e-6  # of the dtype itself
        assert (mine - theirs).abs().max() <= largest * (1 / 254 + rounding)
        assert torch.equal(mine[theirs == 0], theirs[theirs == 0])
        at_most = theirs.abs() == largest
        torch.testing.assert_close(mine[at_most], theirs[at_most], rtol=1e-7, atol=0)


@given(sizes, st.sampled_from([1.0, 3.0, 1e-40, 1e38, 7e-3]), seeds)
def test_what_has_three_levels_comes_back_with_its_bits(size: int, a: float, seed: int) -> None:
    signs = torch.randint(-1, 2, (size,), generator=torch.Generator().manual_seed(seed))
    x = signs * torch.tensor(a)
    assert torch.equal(received(x), x)


@given(sizes, st.integers(1, 4), st.sampled_from(DTYPES))
def test_the_bytes_are_those_of_the_elements_and_a_scale_for_each_block(
    size: int, ranks: int, dtype: torch.dtype
) -> None:
    sent = quantized(torch.ones(ranks, size, dtype=dtype))
    assert sent.dtype is torch.int8 and tuple(sent.shape) == (ranks, wire_numel(size))
    assert wire_numel(size) == size + 4 * -(-size // BLOCK)


@covered(bad=[float("nan"), float("inf"), -float("inf")], dtype=[*DTYPES])
def test_a_block_that_is_not_finite_is_received_as_nan_and_no_other(
    bad: float, dtype: torch.dtype
) -> None:
    x = torch.ones(3 * BLOCK, dtype=dtype)
    x[BLOCK + 5] = bad
    first, second, third = blocks_of(received(x))
    assert second.isnan().all()
    assert torch.equal(first, torch.ones_like(first)) and torch.equal(third, torch.ones_like(third))


def test_numbers_beyond_fp32_are_seen_or_are_zero() -> None:
    assert received(torch.tensor([1e300, 1.0], dtype=torch.float64)).isnan().all()
    assert received(torch.tensor([1e-300, 0.0], dtype=torch.float64)).tolist() == [0.0, 0.0]


@given(sizes, st.integers(1, 4), seeds)
def test_a_sum_is_that_of_what_each_rank_sent_in_their_order(
    size: int, ranks: int, seed: int
) -> None:
    x = torch.randn(ranks, size, generator=torch.Generator().manual_seed(seed))
    wanted = received(x[0])
    for row in x[1:]:
        wanted = wanted + received(row)
    assert torch.equal(sum_of(quantized(x), size, torch.float32), wanted)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_without_elements_are_sent_and_summed(ranks: int) -> None:
    sent = quantized(torch.zeros(ranks, 0))
    assert tuple(sent.shape) == (ranks, 0)
    assert tuple(dequantized(sent, 0, torch.float32).shape) == (ranks, 0)
    assert tuple(sum_of(sent, 0, torch.float32).shape) == (0,)
