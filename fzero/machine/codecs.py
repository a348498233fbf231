"""The codecs that fzero has: what crosses ranks in the place of gradients or parameters.

    x [.., n]   in blocks, a = max |x| of each; step: a / 127 (int8), a / 7 (int4) or a / 448 (fp8),
                rounded up to a few bits
    sent        a in fp32, and x / step, rounded
    received    to within half a step, or half a unit in the last place, of x; where |x| = a exactly

Where a block has an infinity or a NaN, all of it is received as NaN. Each is a frozen record: equal
on every rank, printable, and usable on any tensor by itself.

Source: Wang et al., "ZeRO++", arXiv 2306.10209, sections 3.1 and 3.3 (blocks); Micikevicius et al.,
"FP8 Formats for Deep Learning", arXiv 2209.05433; Gupta et al., "Deep Learning with Limited
Numerical Precision", arXiv 1502.02551, section 3 (rounding by chance). `powersgd` has a file of its
own, and so has `nf4`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fzero.errors.check import is_count, require
from fzero.machine.blocks import blocks_in, in_blocks, largest_of_block, with_largest
from fzero.machine.codebooks import dynamic8 as dynamic8
from fzero.machine.nf4 import nf4 as nf4
from fzero.machine.powersgd import powersgd as powersgd
from fzero.state.codec import Codec as Codec
from fzero.state.codec import Memory, mixed, rounding
from fzero.state.codec import cast as cast

__all__ = [
    "Codec",
    "bf16",
    "cast",
    "dynamic8",
    "fp8",
    "int4",
    "int8",
    "nf4",
    "powersgd",
    "stochastic",
]

_SCALE_BYTES = 4
_FP8, _FP8_TOP = torch.float8_e4m3fn, 448
_UP = 2.0**-10  # what rounding a step up to 12 bits adds to it, and fp32 to what is computed of it
_TINY = 2.0**-126  # fp32 has no 12 bits near its end
_LOW = 0xFFFF  # the bits of an fp32 number that bf16 has not


@dataclass(frozen=True)
class bf16(Codec):
    """bf16 on the wire, and a sum in fp32: half the bytes of fp32, no memory.

    Example:
        >>> bf16().wire_bytes(100)
        200
    """

    def encode(self, x: Tensor) -> tuple[Tensor]:
        """Round to the nearest."""
        return (x.to(torch.bfloat16),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Widen."""
        return parts[0].to(dtype)

    def wire_bytes(self, numel: int) -> int:
        """Return two bytes for each."""
        return 2 * numel

    def bound(self, x: Tensor) -> Tensor:
        """Half a unit in the last place."""
        return rounding(x, torch.bfloat16, 0.5)


@dataclass(frozen=True)
class stochastic(Codec):
    """bf16 on the wire, rounded up or down by chance, so that the error has mean zero.

    The chance is a hash of an element's place and bits, and of all the bits of its row: the same
    values are rounded alike, by every driver and in each run.

    Example:
        >>> x = torch.full((4096,), 1.0 + 2.0**-9)  # 1/4 of the way to the next bf16 number
        >>> (received,) = stochastic().encode(x)
        >>> round(float(received.double().mean() - 1) * 2**9)
        1
    """

    def encode(self, x: Tensor) -> tuple[Tensor]:
        """Add 16 bits of noise below the last bit, and cut."""
        x = x.to(torch.float32)
        bits = x.contiguous().view(torch.int32)
        place = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
        hashed = bits ^ (place * 0x2545F491)
        row = hashed.sum(-1, keepdim=True, dtype=torch.int64).to(torch.int32)
        noise = mixed(hashed ^ mixed(row)) & _LOW
        up = ((bits + noise) & ~_LOW).view(torch.float32)
        return (torch.where(torch.isfinite(x), up, x).to(torch.bfloat16),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Widen."""
        return parts[0].to(dtype)

    def wire_bytes(self, numel: int) -> int:
        """Return two bytes for each."""
        return 2 * numel

    def bound(self, x: Tensor) -> Tensor:
        """A unit in the last place."""
        return rounding(x, torch.bfloat16, 1.0)


@dataclass(frozen=True)
class int8(Codec):
    """Blocks of int8 with a scale in fp32 each, and error feedback.

    Args:
        block: elements that share a scale: an outlier costs its block, a scale 4 bytes.
        memory: see `Codec`.

    Example:
        >>> int8().wire_bytes(256), int8().wire_bytes(257), int8().wire_bytes(0)
        (260, 265, 0)
    """

    block: int = 256
    memory: Memory = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what is no block."""
        super().__post_init__()
        require(f"{type(self).__name__}: block", self.block, is_count, "an int of 1 or more")

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the levels."""
        return _levels(x, self.block, 127)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Levels times scales."""
        return _values(parts[0], parts[1], 127, self.block, dtype)

    def wire_bytes(self, numel: int) -> int:
        """A byte for each, and the scales."""
        return numel + _SCALE_BYTES * blocks_in(numel, self.block)

    def bound(self, x: Tensor) -> Tensor:
        """Half a level of the largest of the block."""
        return largest_of_block(x, self.block) * ((1 + _UP) / 254) + _TINY

    def of_squares(self) -> Codec:
        """Return levels that reach far down: among even ones most squares are 0."""
        return dynamic8(block=self.block, signed=False)


@dataclass(frozen=True)
class int4(int8):
    """Blocks of 4 bits (15 levels) with a scale in fp32 each, and error feedback.

    Args:
        block: elements that share a scale.
        memory: see `Codec`.

    Example:
        >>> codec = int4(block=64)
        >>> codec.wire_bytes(1024), codec.decode(codec.encode(torch.ones(3)), 3, torch.float32)
        (576, tensor([1., 1., 1.]))
    """

    block: int = 64

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales, and the levels, two in a byte."""
        scales, levels = _levels(x, self.block, 7)
        if levels.shape[-1] % 2:
            levels = torch.nn.functional.pad(levels, (0, 1))
        levels = (levels + 8).to(torch.uint8)
        return scales, levels[..., ::2] | (levels[..., 1::2] << 4)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Levels times scales."""
        both = torch.stack([parts[1] & 15, parts[1] >> 4], -1).flatten(-2)[..., :numel]
        return _values(parts[0], both.to(torch.int8) - 8, 7, self.block, dtype)

    def wire_bytes(self, numel: int) -> int:
        """Half a byte for each, and the scales."""
        return -(-numel // 2) + _SCALE_BYTES * blocks_in(numel, self.block)

    def bound(self, x: Tensor) -> Tensor:
        """Half a level of the largest of the block."""
        return largest_of_block(x, self.block) * ((1 + _UP) / 14) + _TINY


@dataclass(frozen=True)
class fp8(int8):
    """Blocks of 8-bit floats (e4m3) with a scale in fp32 each, and error feedback.

    What is small beside the largest of its block keeps 4 significant bits, where `int8` has fewer.
    It crosses as bytes, for backends refuse such floats.

    Args:
        block: elements that share a scale.
        memory: see `Codec`.

    Example:
        >>> codec = fp8()
        >>> codec.decode(codec.encode(torch.tensor([1.0, 0.01])), 2, torch.float32)
        tensor([1.0000, 0.0098])
    """

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the floats."""
        scales, scaled = _scaled(x, self.block, _FP8_TOP)
        return scales, scaled.to(_FP8).flatten(-2)[..., : x.shape[-1]]

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Floats times scales."""
        return _values(parts[0], parts[1], _FP8_TOP, self.block, dtype)

    def bound(self, x: Tensor) -> Tensor:
        """Half a unit in the last place of 4 bits, or half of the smallest number of the block."""
        smallest = largest_of_block(x, self.block) * (2.0**-9 / _FP8_TOP) + _TINY
        return x.abs() * 2.0**-4 + smallest


def _scaled(x: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    """Return a of each block in fp32, and x / step, [.., blocks, block], 0 beside a NaN."""
    blocks, largest = with_largest(x, block)
    scaled = blocks / _step(largest, top).unsqueeze(-1)  # NaN where all is zero, too
    return largest, scaled.clamp_(-top, top).nan_to_num_(0.0)


def _step(largest: Tensor, top: int) -> Tensor:
    """a / top, rounded up to few bits: so steps times levels, and sums of some, are exact in fp32.

    12 bits beside integers; of 8-bit floats, whose levels reach from 2^-9 to 448, a power of two.
    """
    step = largest / top
    below = 0x7FFFFF if top == _FP8_TOP else 0xFFF
    up = ((step.view(torch.int32) + below) & ~below).view(torch.float32)
    up = torch.where(up * top < largest, (up.view(torch.int32) + below + 1).view(up.dtype), up)
    return torch.where(step > _TINY, up, step)  # of a NaN itself


def _levels(x: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    largest, scaled = _scaled(x, block, top)
    return largest, scaled.round_().to(torch.int8).flatten(-2)[..., : x.shape[-1]]


def _values(largest: Tensor, levels: Tensor, top: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return levels times steps, but none beyond a: [.., n]."""
    blocks = in_blocks(levels.to(dtype), block)
    largest = largest.contiguous().unsqueeze(-1)
    values = blocks.mul_(_step(largest, top)).clamp_(-largest.to(dtype), largest.to(dtype))
    return values.flatten(-2)[..., : levels.shape[-1]]
