"""`nf4` against bitsandbytes: the levels, the bytes, the decoded values, and what scales lose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fzero.machine.codecs import LEVELS, nf4

bitsandbytes = pytest.importorskip("bitsandbytes.functional")

SIZES = (1, 2, 63, 64, 65, 1000, 64 * 256 + 1, 64 * 700 + 13)


def values(numel: int) -> Tensor:
    draw = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=draw) * torch.rand(numel, generator=draw)
    x[: min(numel, 70) // 2] = 0.0  # a block of zeros, where there is room for one
    return x


def theirs(x: Tensor, block: int, *, double: bool) -> tuple[Tensor, Tensor]:
    packed, state = bitsandbytes.quantize_4bit(
        x, blocksize=block, quant_type="nf4", compress_statistics=double
    )
    scales = state.absmax
    if double:
        scales = bitsandbytes.dequantize_blockwise(scales, state.state2) + state.offset
    levels = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], -1).flatten()[: x.numel()]
    assert tuple(state.code.tolist()) == LEVELS == tuple(torch.tensor(LEVELS).tolist())
    each = scales.repeat_interleave(block)[: x.numel()]
    return packed.flatten(), state.code[levels.int()] * each


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("numel", SIZES)
def test_bytes_and_values_are_those_of_bitsandbytes(numel: int, block: int) -> None:
    x, codec = values(numel), nf4(block=block, double=False)
    packed, decoded = theirs(x, block, double=False)
    parts = codec.encode(x)
    assert torch.equal(parts[-1][: numel // 2], packed[: numel // 2])  # the last may be half full
    assert torch.equal(codec.decode(parts, numel, torch.float32), decoded)


def test_scales_of_8_bits_lose_no_more_than_those_of_bitsandbytes() -> None:
    for numel in SIZES[-2:]:
        x = values(numel)
        ours = nf4().decode(nf4().encode(x), numel, torch.float32)
        lost = [(y - x).square().mean() for y in (ours, theirs(x, 64, double=True)[1])]
        assert lost[0] < lost[1] * 1.002


@pytest.mark.parametrize("codec", [nf4(), nf4(block=5), nf4(double=False)], ids=str)
@pytest.mark.parametrize("numel", [0, *SIZES])
def test_what_was_decoded_is_encoded_in_the_same_bytes(numel: int, codec: nf4) -> None:
    x = values(numel).expand(2, numel)
    parts = codec.encode(x)
    assert sum(part[0].nbytes for part in parts) == codec.wire_bytes(numel)
    decoded = codec.decode(parts, numel, torch.float32)
    assert (decoded - x).abs().le(codec.bound(x)).all()
    for before, after in zip(parts, codec.encode(decoded), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(("codec", "lost"), [(nf4(), 256 * 64), (nf4(double=False), 64)])
def test_a_block_with_an_infinity_is_nan(codec: nf4, lost: int) -> None:
    x = torch.ones(300 * 64)
    x[7] = torch.inf
    decoded = codec.decode(codec.encode(x), x.numel(), torch.float32)
    assert decoded[:lost].isnan().all() and decoded[lost:].eq(1.0).all()


def test_a_weight_takes_0_516_bytes() -> None:
    assert nf4().wire_bytes(2**24) / 2**24 == 0.51611328125
