"""Rows of values in blocks that share a scale: what codecs with scales are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def blocks_in(numel: int, block: int) -> int:
    """Return how many blocks so many elements are."""
    return -(-numel // block)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """[.., n] -> [.., ceil(n / block), block], filled up with zeros; a view of `x` if it fits."""
    blocks = blocks_in(x.shape[-1], block)
    missing = blocks * block - x.shape[-1]
    filled = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return filled.reshape(*x.shape[:-1], blocks, block)


def with_largest(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return x in blocks, and max |x| of each in fp32; NaN where it is no finite number."""
    blocks = in_blocks(x, block)
    largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).to(torch.float32)
    return blocks, torch.where(largest.isfinite(), largest, torch.nan)


def largest_of_block(x: Tensor, block: int) -> Tensor:
    """Return max |x| of the block of each element."""
    largest = in_blocks(x.abs(), block).amax(-1, keepdim=True)
    return largest.expand(*largest.shape[:-1], block).flatten(-2)[..., : x.shape[-1]]
