"""Levels that are not evenly spaced, and blocks whose bytes are carried."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fzero.machine.blocks import Blocks
from fzero.machine.codecs import dynamic8, dynamic_levels, int8

F32 = torch.float32


def received(codec: dynamic8, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.shape[-1], F32)


def spread(seed: int, signed: bool) -> Tensor:
    """Numbers of all sizes, with blocks of zeros, of one size, and of numbers below 2^-126."""
    generator, shape = torch.Generator().manual_seed(seed), (40, 700)
    powers = 6 * torch.randn(shape, generator=generator) + torch.randint(
        -36, 30, (shape[0], 1), generator=generator
    )
    x = torch.randn(shape, generator=generator) * 10.0**powers
    x[0], x[1], x[2] = 0.0, -3.0, 1e-43 * torch.randn(shape[1], generator=generator)
    x = torch.where(x.isfinite(), x, 1.0)
    return x if signed else x.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed)
    torch.testing.assert_close(dynamic_levels(signed=signed), theirs, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_level_is_found(signed: bool) -> None:
    levels = dynamic_levels(signed=signed)
    middles = ((levels[1:].double() + levels[:-1]) / 2).float()
    steps = torch.linspace(-1.0 if signed else 0.0, 1.0, 20_001)
    tried = [steps, steps**5, levels, middles, middles.nextafter(torch.tensor(2.0))]
    x = torch.cat([*tried, torch.ones(1)])  # of a scale of 1
    found = dynamic8(x.numel(), signed=signed).encode(x)[1].long()
    nearest = torch.searchsorted(middles, x, right=True)
    wanted = nearest if signed else torch.where((x > 0) & (nearest == 0), 1, nearest)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("stochastic", [False, True])
def test_what_was_received_is_received_again(signed: bool, stochastic: bool) -> None:
    codec = dynamic8(signed=signed, stochastic=stochastic)
    for seed in range(5):
        x = spread(seed, signed)
        once = received(codec, x)
        assert bool(((once - x).abs() <= codec.bound(x)).all())
        largest = x.abs().view(40, 700)[:, :256].argmax(-1, keepdim=True)
        assert torch.equal(once.gather(1, largest), x.gather(1, largest))
        wide = x[3:].abs().amax(-1) > 1e-20  # where levels times scales are no subnormal numbers
        again = received(codec.at(seed), once) if stochastic else received(codec, once)
        if not stochastic:
            assert torch.equal(again, once)
        assert torch.equal(again[3:][wide], once[3:][wide])


def test_a_positive_square_is_never_zero() -> None:
    x = torch.tensor([[1.0, 1e-12, 0.0, 3e-30]])
    for stochastic in (False, True):
        found = received(dynamic8(signed=False, stochastic=stochastic), x)[0]
        assert found[1] > 0 and found[2] == 0 and found[3] > 0


def test_a_block_with_an_infinity_is_nan() -> None:
    x = torch.ones(2, 512)
    x[0, 3], x[1, 300] = torch.inf, torch.nan
    nan = received(dynamic8(), x).isnan()
    assert nan[0, :256].all() and nan[1, 256:].all() and int(nan.sum()) == 512
    huge = torch.tensor([3e38, -3e38])
    assert torch.equal(received(dynamic8(), huge)[:1], huge[:1])


def test_rounding_by_chance_is_right_in_the_mean() -> None:
    x = torch.linspace(-0.99, 1.0, 256)
    codec, total = dynamic8(stochastic=True), torch.zeros(256, dtype=torch.float64)
    for update in range(500):
        total += received(codec.at(update), x)
    apart = (total / 500 - x).abs().max()
    assert apart < 5 * 0.0141 / 2 / 500**0.5  # five standard errors
    assert (received(dynamic8(), x) - x).abs().max() > 2 * apart
    assert torch.equal(codec.at(3).encode(x)[1], codec.at(torch.tensor(3)).encode(x)[1])


def test_bytes_of_blocks_are_a_function_of_the_block_alone() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for codec in (Blocks(dynamic8(64, stochastic=True)), Blocks(int8(64))):
        row = codec.row_of(x, 7)
        assert row.numel() == codec.wire_bytes(1000) == 16 * 68
        assert torch.equal(codec.row_of(x[128:512], 7), row[2 * 68 : 8 * 68])
        assert codec.numbers(codec.fill(torch.empty_like(row), 2.0)).eq(2.0).all()
        changed = codec.numbers(row)
        changed[70] = 5.0
        before = row.clone()
        codec.write(row, changed)
        other = [k for k in range(16) if not torch.equal(row[68 * k :][:68], before[68 * k :][:68])]
        assert other == [1] and codec.numbers(row)[64:128].abs().max() >= 5.0
