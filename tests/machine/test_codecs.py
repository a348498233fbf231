"""What each codec says of itself, on tensors alone: its bound, its bytes, its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import codecs
from fzero.errors import LayoutError
from fzero.machine.codecs import Codec
from fzero.machine.compress import require_codec
from fzero.state.codec import decoded, encoded, sum_of
from tests.covering import covered
from tests.strategies import seeds
from tests.transforms.codecs_tried import EVERY, Signs, each_codec

SIZES = st.sampled_from([1, 2, 3, 63, 64, 255, 256, 257, 1000])
INT8 = codecs.int8()


def received(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.shape[-1], x.dtype)


def drawn(size: int, power: int, seed: int) -> Tensor:
    """Two rows; some of the first are zero."""
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    x[0, : size // 3] = 0.0
    return x


@each_codec
@given(size=SIZES, power=st.integers(-30, 12), seed=seeds)
def test_what_is_received_is_within_the_bound_and_the_bytes_are_as_declared(
    codec: Codec, size: int, power: int, seed: int
) -> None:
    x = drawn(size, power, seed)
    found = received(codec, x)
    assert found.shape == x.shape and found.dtype is x.dtype
    assert ((found - x).abs() <= codec.bound(x)).all()
    buffer, form = encoded(codec, x)
    assert buffer[0].numel() * buffer.itemsize == codec.wire_bytes(size)
    assert torch.equal(decoded(codec, buffer, form, x.dtype), found)
    for row, whole in zip(x, found, strict=True):  # each row by itself
        torch.testing.assert_close(received(codec, row), whole, rtol=0, atol=0)
    wanted = found[0] + found[1]
    if not codec.linear:
        assert torch.equal(sum_of(codec, buffer, form, x.dtype), wanted)


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_a_bound_is_not_many_times_of_what_is_lost(codec: Codec) -> None:
    x = drawn(4096, 0, 0)
    assert ((received(codec, x) - x).abs() / codec.bound(x).clamp_min(1e-30)).max() > 0.4


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (codecs.bf16(), torch.bfloat16),
        (codecs.stochastic(), torch.bfloat16),
        (codecs.cast(torch.float16), torch.float16),
        (INT8, torch.int8),
        (codecs.int4(), torch.uint8),
        (codecs.fp8(), torch.uint8),  # which every backend takes
    ],
)
def test_the_dtype_of_what_is_sent(codec: Codec, dtype: torch.dtype) -> None:
    assert encoded(codec, torch.ones(2, 5))[0].dtype is dtype
    assert encoded(codec, torch.ones(2, 0))[0].shape == (2, 0)


@given(st.sampled_from([1.0, 3.0, 1e-40, 1e38, 7e-3]), SIZES, seeds)
def test_what_has_three_levels_comes_back_with_its_bits(a: float, size: int, seed: int) -> None:
    x = torch.randint(-1, 2, (size,), generator=torch.Generator().manual_seed(seed)) * a
    assert torch.equal(received(INT8, x), x) and torch.equal(received(codecs.int4(), x), x)


@covered(
    codec=[INT8, codecs.int4(block=256), codecs.fp8()],
    bad=[float("nan"), float("inf"), -float("inf")],
    dtype=[torch.float32, torch.float64],
)
def test_a_block_that_is_not_finite_is_received_as_nan_and_no_other(
    codec: Any, bad: float, dtype: torch.dtype
) -> None:
    x = torch.ones(3 * codec.block, dtype=dtype)
    x[codec.block + 5] = bad
    first, second, third = received(codec, x).split(codec.block)
    assert second.isnan().all()
    assert torch.equal(first, torch.ones_like(first)) and torch.equal(third, torch.ones_like(third))


def test_numbers_beyond_fp32_are_seen_or_are_zero() -> None:
    assert received(INT8, torch.tensor([1e300, 1.0], dtype=torch.float64)).isnan().all()
    assert received(INT8, torch.tensor([1e-300, 0.0], dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_rounding_by_chance_has_the_mean_of_what_it_rounds() -> None:
    """Of other values, other chances: also where one element alone is another."""
    x = torch.full((64, 4096), 1.0 + 2.0**-9)
    x[:, 0] = torch.arange(64.0)
    up = (received(codecs.stochastic(), x)[:, 1:] > x[:, 1:]).double()
    assert abs(float(up.mean()) - 0.25) < 0.005
    assert abs(float(up.mean(0).std()) - (0.25 * 0.75 / 64) ** 0.5) < 0.005


@pytest.mark.parametrize("codec", [INT8, codecs.int4(), codecs.fp8()], ids=str)
@given(seed=seeds)
def test_an_fp32_memory_of_whole_numbers_is_exact(codec: Codec, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    left, sent, whole = torch.zeros(300), torch.zeros(300), torch.zeros(300)
    for _ in range(12):
        x = torch.randint(-99, 100, (300,), generator=source).float()
        total = left + x
        sent, whole = sent + received(codec, total), whole + x
        left = total - received(codec, total)
    assert torch.equal(sent + left, whole) and left.any()


class Misses(Signs):
    def wire_bytes(self, numel: int) -> int:
        return numel


class Flattens(Signs):
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().encode(x.flatten())


class Boasts(Signs):
    def bound(self, x: Tensor) -> Tensor:
        return x.abs() / 254


class NoTuple(Signs):
    def encode(self, x: Tensor) -> Any:
        return x


class TwoSums(Signs):
    linear = True


class Companded(Codec):
    """Each row comes back as it was, but the sum of two rows is not that of their roots."""

    linear = True

    def encode(self, x: Tensor) -> tuple[Tensor]:
        return (x.sign() * x.abs().sqrt(),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return (parts[0] * parts[0].abs()).to(dtype)

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def bound(self, x: Tensor) -> Tensor:
        return x.abs() * 1e-5


class Shifted(Companded):
    """One is added where it is encoded, and taken away once."""

    def encode(self, x: Tensor) -> tuple[Tensor]:
        return (x + 1,)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return (parts[0] - 1).to(dtype)

    def bound(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 1e-4)


class WithItsScale(Companded):
    """The largest number, and all others as parts of it: products do not add up."""

    def encode(self, x: Tensor) -> tuple[Tensor]:
        top = x.abs().amax(-1, keepdim=True)
        return (torch.cat([top, x / top], -1),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return (parts[0][..., :1] * parts[0][..., 1:]).to(dtype)


class Fails(Companded):
    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return parts[0].view(numel + 1, 7)


class Decodes(Signs):
    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Any:
        return parts


class BoundOfNothing(Signs):
    def bound(self, x: Tensor) -> Any:
        return 0.1


class OnlyEncodes(Codec):
    def encode(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


@pytest.mark.parametrize(
    ("codec", "seen"),
    [
        (Companded(), r"linear, and decode\(encode\(x\) \+ encode\(y\)\) is"),
        (Shifted(), "linear, and decode"),
        (WithItsScale(), "linear, and decode"),
        (Codec(), "it has no function encode"),
        (OnlyEncodes(), "it has no function wire_bytes"),
        (Fails(), "decode raised RuntimeError"),
        (Decodes(), "decode gave a tuple"),
        (BoundOfNothing(), "bound gave a float"),
        (Misses(), "1000 elements are 129 bytes, and wire_bytes says 1000"),
        (Flattens(), "no tuple of tensors"),
        (Boasts(), "farther from x than bound"),
        (NoTuple(), "no tuple of tensors"),
        (TwoSums(), "linear"),
    ],
)
def test_a_codec_that_does_not_what_it_says_is_refused(codec: Codec, seen: str) -> None:
    with pytest.raises(LayoutError, match=seen):
        require_codec("compress: gradients", codec)
    with pytest.raises(LayoutError, match=seen):
        fzero.compress(lambda state: (state, None), gradients=codec)


@pytest.mark.parametrize(
    "make",
    [
        lambda: codecs.int8(block=0),
        lambda: codecs.int8(memory=torch.int32),
        lambda: codecs.cast(torch.int8),
        lambda: codecs.cast(torch.bfloat16, memory=True),
    ],
)
def test_options_of_codecs_are_checked(make: Any) -> None:
    with pytest.raises(LayoutError, match="Fix: "):
        make()
