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
own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from fzero.context.current_rank import is_abstract
from fzero.context.modes import is_recorded
from fzero.errors.check import check_flags, is_count, require
from fzero.machine.blocks import blocks_in, in_blocks, largest_of_block, with_largest
from fzero.machine.powersgd import powersgd as powersgd
from fzero.state.codec import Codec, Memory, mixed, rounding
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


_FP8, _FP8_TOP = torch.float8_e4m3fn, 448
_UP = 2.0**-10  # what rounding a step up to 12 bits adds to it, and fp32 to what is computed of it
_TINY = 2.0**-126  # fp32 has no 12 bits near its end
_LOW = 0xFFFF  # the bits of an fp32 number that bf16 has not
_SCALE_BYTES = 4


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
        return (rounded(x, _chance(x.contiguous().view(torch.int32))),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Widen."""
        return parts[0].to(dtype)

    def wire_bytes(self, numel: int) -> int:
        """Return two bytes for each."""
        return 2 * numel

    def bound(self, x: Tensor) -> Tensor:
        """A unit in the last place."""
        return rounding(x, torch.bfloat16, 1.0)


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """Return x [n], fp32, in bf16: up with the probability of what is cut off, else down.

    noise: [n] int32; its low 16 bits are the chance.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv 1502.02551,
    section 3.

    Example:
        >>> x = torch.tensor([1.0, 1.0 + 2**-9])  # 1/4 of the way to the next bf16 number
        >>> rounded(x, torch.tensor([0xFFFF, 0xC000], dtype=torch.int32)).tolist()
        [1.0, 1.0078125]
    """
    bits = x.contiguous().view(torch.int32)
    up = ((bits + (noise & _LOW)) & ~_LOW).view(torch.float32)
    return torch.where(torch.isfinite(x), up, x).to(torch.bfloat16)


def _chance(bits: Tensor, seed: int | Tensor = 0) -> Tensor:
    """Return an int32 hash of each element's place and bits, of all its row's, and of a seed."""
    place = torch.arange(bits.shape[-1], dtype=torch.int32, device=bits.device)
    hashed = bits ^ (place * 0x2545F491)
    row = hashed.sum(-1, keepdim=True, dtype=torch.int64).to(torch.int32)
    return mixed(hashed ^ mixed(row ^ seed))


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
        return _even_levels(x, self.block, 127)

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
        scales, levels = _even_levels(x, self.block, 7)
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


def _even_levels(x: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    largest, scaled = _scaled(x, block, top)
    return largest, scaled.round_().to(torch.int8).flatten(-2)[..., : x.shape[-1]]


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


def _values(largest: Tensor, levels: Tensor, top: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return levels times steps, but none beyond a: [.., n]."""
    blocks = in_blocks(levels.to(dtype), block)
    largest = largest.contiguous().unsqueeze(-1)
    values = blocks.mul_(_step(largest, top)).clamp_(-largest.to(dtype), largest.to(dtype))
    return values.flatten(-2)[..., : levels.shape[-1]]


# Codecs of 256 levels that are not evenly spaced: what is small keeps most of its precision.
#
#     x [n]     in blocks, a: of each the x of the largest |x|, with its sign
#     sent      a in fp32, and the number of the level that is nearest to x / a
#     received  level times a
#
# So the largest of a block is received as it was, and what was received is encoded to the same
# bytes again. Where a block has an infinity or a NaN, all of it is received as NaN.
#
# Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861,
# sections 2.1 and 2.2, and appendix F.2 (dynamic tree quantization, of which the unsigned form has
# no sign).

_DECADES = 7  # levels reach from 1 down to 5.5e-7
_SAME = 2.0**-18  # by how much of itself a number may miss the level that it was decoded from


@dataclass(frozen=True)
class dynamic8(Codec):
    """Blocks of 8 bits with levels in each power of ten, and a scale in fp32 each; no memory.

    Made for the states of optimizers (`fzero.optim.adamw(..., state_dtype=dynamic8())`), whose
    squares of gradients differ by many powers of ten. Without `signed`, where all numbers are 0 or
    more, there are twice as many levels, and a positive number is never received as 0: an update
    may divide by its root.

    Args:
        block: elements that share a scale, which costs 4 bytes.
        signed: whether numbers may be negative; without it those are received as 0.
        stochastic: round up with the probability of what is cut off, so that the error has mean
            zero. The chance is a hash of the bits and places in a block, and of the number of the
            update: it does not depend on ranks.
        seed: of that chance; an update gives its number, by `at`.

    Source: see above. The levels are those of `bitsandbytes.functional.create_dynamic_map`.

    Example:
        >>> codec = dynamic8(block=4)
        >>> codec.decode(codec.encode(torch.tensor([1.0, -0.5, 1e-4, 0.0])), 4, torch.float32)
        tensor([ 1.0000e+00, -5.0078e-01,  8.8750e-05,  0.0000e+00])
    """

    block: int = 256
    signed: bool = True
    stochastic: bool = False
    seed: int | Tensor = 0

    def __post_init__(self) -> None:
        """Refuse what is no block, and a memory."""
        require("dynamic8: memory", self.memory, lambda x: x is False, "False")
        require("dynamic8: block", self.block, is_count, "an int of 1 or more")
        check_flags(**{"dynamic8: signed": self.signed, "dynamic8: stochastic": self.stochastic})

    def of_squares(self) -> Self:
        """Return the same without a sign."""
        return replace(self, signed=False)

    def at(self, update: int | Tensor) -> Self:
        """Return the codec that rounds by another chance in each update."""
        return replace(self, seed=update) if self.stochastic else self

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the numbers of the levels."""
        scales, ratios = self._scaled(x)
        codes = self._rounded(ratios) if self.stochastic else _level(ratios, self.signed, "nearest")
        return scales, codes.flatten(-2)[..., : x.shape[-1]]

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Levels times scales."""
        scales, codes = parts
        blocks = in_blocks(codes, self.block)
        levels = _levels(self.signed, codes.device)
        found = levels.index_select(0, blocks.reshape(-1).to(torch.int32)).to(dtype)
        return (
            found.view(blocks.shape).mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)[..., :numel]
        )

    def wire_bytes(self, numel: int) -> int:
        """A byte for each, and the scales."""
        return numel + _SCALE_BYTES * blocks_in(numel, self.block)

    def bound(self, x: Tensor) -> Tensor:
        """How far the levels on either side of x are apart; all of x where it may not be < 0."""
        scales, ratios = self._scaled(x)
        low, high = self._around(ratios)[1:]
        apart = ((high - low) * scales.abs().unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
        return apart + (0.0 if self.signed else x.clamp(max=0.0).abs()) + 2.0**-126

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a of each block, and x / a, [.., blocks, block], 0 beside a NaN."""
        x = x if self.signed else x.clamp(min=0.0)
        blocks = in_blocks(x, self.block)
        top, low = blocks.amax(-1), blocks.amin(-1)
        scales = torch.where(top >= -low, top, low).to(torch.float32)
        scales = torch.where(top.isfinite() & low.isfinite(), scales, torch.nan)
        ratios = (blocks.to(torch.float32) / scales.unsqueeze(-1)).nan_to_num_(0.0)  # of zeros, too
        return scales, ratios

    def _around(self, ratios: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number of the level that is not above each ratio, that level, the next one."""
        levels = _levels(self.signed, ratios.device)
        below = _level(ratios, self.signed, "below").to(torch.int32)
        near = levels, torch.cat([levels[1:], levels[-1:]])
        low, high = (some.index_select(0, below.view(-1)).view_as(ratios) for some in near)
        return below, low, high

    def _rounded(self, ratios: Tensor) -> Tensor:
        """Return a level on either side of each ratio, by chance: the ratio in the mean."""
        below, low, high = self._around(ratios)
        near = torch.where(ratios - low < high - ratios, low, high)
        share = (ratios - low) / (high - low)
        exact = (ratios - near).abs() <= _SAME * near.abs()
        up = torch.where(exact, near > low, self._noise(ratios) < share)
        if not self.signed:
            up |= (ratios > 0) & (below == 0)
        return torch.where(up, below + 1, below).to(torch.uint8)

    def _noise(self, ratios: Tensor) -> Tensor:
        """Return numbers in [0, 1) that are a function of the blocks and the seed."""
        seed = (self.seed * 0x5851F42D + 0x14057B7E) % 2**31
        return (_chance(ratios.view(torch.int32), seed) & 0xFFFFFF).float() * 2.0**-24


def dynamic_levels(*, signed: bool) -> Tensor:
    """Return the 256 levels in ascending order: in each of seven powers of ten twice as many.

    Example:
        >>> dynamic_levels(signed=False)[[0, 1, -1]]
        tensor([0.0000e+00, 3.2500e-07, 1.0000e+00])
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1)
        middles = (10.0 ** (decade + 1 - _DECADES) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        found += [*middles, *(-x for x in middles if signed)]
    return torch.tensor(sorted(found))


def _levels(signed: bool, device: torch.device) -> Tensor:
    return _table(signed, "levels", device)[0]


def _table(signed: bool, which: str, device: torch.device) -> tuple[Tensor, ...]:
    def made() -> tuple[Tensor, ...]:
        levels = dynamic_levels(signed=signed)
        return (levels,) if which == "levels" else _bounds(levels, signed, which)

    return _on(device, (signed, which), made)


def _on(
    device: torch.device, name: Hashable, make: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return tables on a device, which are kept, as the host waits to copy them.

    Unless they have no values: those of a record end with it.
    """
    if (found := _TABLES.get((name, device))) is not None:
        return found
    made = tuple(x.to(device) for x in make())
    if not (is_abstract() or is_recorded(made)):
        _TABLES[name, device] = made
    return made


_TABLES: dict[tuple[Hashable, torch.device], tuple[Tensor, ...]] = {}


def _level(ratios: Tensor, signed: bool, which: str) -> Tensor:
    """Return the number of the level that is nearest to each ratio, or that is not above it.

    The first 16 bits of a ratio leave two levels at most, of which it is said where the second one
    begins: so two look-ups do what a search would take long for.
    """
    first, begins = _table(signed, which, ratios.device)
    key = ((ratios.view(torch.int32) >> 16) & 0xFFFF).reshape(-1)
    above = ratios.reshape(-1) >= begins.index_select(0, key)
    return (first.index_select(0, key) + above.view(torch.uint8)).view_as(ratios)


def _bounds(levels: Tensor, signed: bool, which: str) -> tuple[Tensor, Tensor]:
    """Return by the first 16 bits of a ratio its lower level, and from which ratio on the next."""
    edges = levels[1:] if which == "below" else ((levels[1:].double() + levels[:-1]) / 2).float()
    if not signed and which == "nearest":
        edges[0] = 2.0**-149  # a positive number is never 0
    keys = torch.arange(65536, dtype=torch.int32) << 16
    ends = torch.stack([keys, keys | 0xFFFF]).view(torch.float32).nan_to_num(nan=2.0)
    low, high = ends.amin(0), ends.amax(0)
    first = torch.searchsorted(edges, low, right=True)  # edges at or below the lowest of a key
    begins = torch.cat([edges, torch.tensor([torch.inf])])[first]
    begins = torch.where(begins <= high, begins, torch.inf)
    return first.to(torch.uint8), begins


# `nf4`: 4 bits for each weight, levels where a normal distribution has its weights.
#
#     x [.., n]   in blocks, a = max |x| of each
#     stored      the level nearest to x / a, of 16, two in a byte; and a
#     double      a in 8 bits, between the smallest and the largest a of 256 blocks, in fp32
#     decoded     level times a
#
# Where a block has an infinity or a NaN, it is decoded as NaN, and with `double` so are the 256
# blocks that share the ends of its scale.

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What 4 bits stand for, in units of the largest of a block: arXiv 2305.14314, appendix E."""

_WIDEST = max(b - a for a, b in pairwise(LEVELS)) / 2
_TOGETHER = 256  # scales that share their ends
_EPS = 2.0**-22  # beyond what fp32 rounds in a quotient, a product and a sum


@dataclass(frozen=True)
class nf4(Codec):
    """4-bit normal floats in blocks, for frozen weights: 0.516 bytes for each, in blocks of 64.

    The levels are those of QLoRA, and without `double` so is each decoded value. Scales of 8 bits
    lie at equal distances between the smallest and the largest of 256; QLoRA's are 8-bit floats
    around the mean of all of a tensor.

    Args:
        block: elements that share a scale.
        double: whether scales have 8 bits in the place of fp32 (4 bytes).
        memory: see `Codec`.

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314,
    section 3 and appendix E.

    Example:
        >>> nf4().wire_bytes(2**20) / 2**20, nf4(double=False).wire_bytes(2**20) / 2**20
        (0.51611328125, 0.5625)
        >>> codec = nf4()
        >>> codec.decode(codec.encode(torch.tensor([2.0, 1.0, 0.0])), 3, torch.float32)
        tensor([2.0000, 0.8814, 0.0000])
    """

    block: int = 64
    double: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no block."""
        super().__post_init__()
        require("nf4: block", self.block, is_count, "an int of 1 or more")
        require("nf4: double", self.double, lambda x: isinstance(x, bool), "True or False")

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the scales, and the levels, two in a byte, the first one in the upper bits."""
        blocks, largest = with_largest(x, self.block)
        scaled = (blocks / largest.unsqueeze(-1)).nan_to_num_(0.0).to(torch.float32)
        between = torch.tensor([(a + b) / 2 for a, b in pairwise(LEVELS)])
        levels = torch.bucketize(scaled, between.to(x.device), out_int32=True).to(torch.uint8)
        levels = levels.flatten(-2)[..., : x.shape[-1]]
        if levels.shape[-1] % 2:
            levels = torch.nn.functional.pad(levels, (0, 1))
        packed = (levels[..., ::2] << 4) | levels[..., 1::2]
        return (*(_in_8_bits(largest) if self.double else (largest,)), packed)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Levels times scales."""
        *of_scales, packed = parts
        scales = _of_8_bits(*of_scales) if self.double else of_scales[0]
        (both,) = _on(packed.device, "pairs of nf4", _pairs)
        pairs = both.index_select(0, packed.reshape(-1).to(torch.int32))
        values = pairs.view(packed.shape).view(torch.float32)[..., :numel]
        blocks = in_blocks(values.to(dtype), self.block)  # new memory, whatever the dtype
        return blocks.mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)[..., :numel]

    def wire_bytes(self, numel: int) -> int:
        """Half a byte for each, and the scales."""
        count = blocks_in(numel, self.block)
        scales = count + 8 * blocks_in(count, _TOGETHER) if self.double else 4 * count
        return -(-numel // 2) + scales

    def bound(self, x: Tensor) -> Tensor:
        """Half of the widest gap of levels times the scale, and what the scale has lost."""
        largest = largest_of_block(x, self.block)
        lost = torch.zeros_like(largest)
        if self.double:
            of_blocks = largest[..., :: self.block].to(torch.float32)
            found = (_of_8_bits(*_in_8_bits(of_blocks)) - of_blocks).abs()
            lost = found.repeat_interleave(self.block, -1)[..., : x.shape[-1]].to(x.dtype)
        return largest * (_WIDEST + _EPS) + lost * (1 + _EPS) + 2.0**-126


def _pairs() -> tuple[Tensor]:
    """The two levels of each byte of nf4, [256], each pair as one number."""
    first = torch.tensor(LEVELS).repeat_interleave(16)
    both = torch.stack([first, first.view(16, 16).T.reshape(-1)], -1)
    return (both.view(torch.float64).view(-1),)


def _in_8_bits(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [.., b] -> the smallest and the largest of each 256 [.., k 2], and steps [.., b]."""
    missing = -scales.shape[-1] % _TOGETHER
    filled = torch.cat([scales, scales[..., -1:].expand(*scales.shape[:-1], missing)], -1)
    some = filled.unflatten(-1, (-1, _TOGETHER))
    low, high = some.amin(-1, keepdim=True), some.amax(-1, keepdim=True)
    steps = ((some - low) / ((high - low) / 255)).round_().nan_to_num_(0.0).clamp_(0, 255)
    ends = torch.cat([low, high], -1).flatten(-2)
    return ends, steps.to(torch.uint8).flatten(-2)[..., : scales.shape[-1]]


def _of_8_bits(ends: Tensor, steps: Tensor) -> Tensor:
    """The ends, and steps between them -> scales [.., b] in fp32."""
    low, high = ends.contiguous().unflatten(-1, (-1, 2)).split(1, -1)
    some, step = in_blocks(steps.to(torch.float32), _TOGETHER), (high - low) / 255
    # From the nearer end: both ends come back, so what is encoded again has the same steps.
    scales = torch.where(some < 128, low + some * step, high - (255 - some) * step)
    return scales.flatten(-2)[..., : steps.shape[-1]]
