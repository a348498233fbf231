"""`nf4`: 4 bits for each weight, levels where a normal distribution has its weights.

    x [.., n]   in blocks, a = max |x| of each
    stored      the level nearest to x / a, of 16, two in a byte; and a
    double      a in 8 bits, between the smallest and the largest a of 256 blocks, which are in fp32
    decoded     level times a

Where a block has an infinity or a NaN, it is decoded as NaN, and with `double` so are the 256
blocks that share the ends of its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fzero.errors.check import is_count, require
from fzero.machine.blocks import blocks_in, in_blocks, largest_of_block, with_largest
from fzero.state.codec import Codec

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
        first = torch.tensor(LEVELS, device=packed.device).repeat_interleave(16)
        both = torch.stack([first, first.view(16, 16).T.reshape(-1)], -1).view(torch.float64)
        pairs = both.view(-1).index_select(0, packed.reshape(-1).to(torch.int32))
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
