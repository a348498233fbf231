"""Stochastic rounding fp32 -> bf16: up or down at random, with the fp32 value as mean.

The chance is a function of the update's number and of the element, so that an update is pure: the
same at every stage and number of ranks, and again after a resume.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.optim._piece import Piece

_LOW = 0xFFFF  # the bits of an fp32 number that bf16 has not


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
    bits = x.view(torch.int32)
    up = ((bits + (noise & _LOW)) & ~_LOW).view(torch.float32)
    return torch.where(torch.isfinite(x), up, x).to(torch.bfloat16)


def noise_of(pieces: Sequence[Piece], like: Tensor, count: Tensor) -> Tensor:
    """Return [n] int32 for a flat like `like`: a hash of each element's place, and of `count`.

    The place of an element is its leaf's path and its number in it. pieces: those of this flat.
    Padding has any noise: zero is rounded to zero.
    """
    noise = torch.zeros(like.numel(), dtype=torch.int32, device=like.device)
    for _, leaf, start, stop, first in pieces:
        key = zlib.crc32(leaf.path.encode()) & 0x7FFFFFFF
        noise[start:stop] = torch.arange(
            first, first + stop - start, dtype=torch.int32, device=like.device
        )
        noise[start:stop] += key
    step = count.to(like.device, torch.int32)
    return _mixed(_mixed(noise) ^ (step * 0x2545F491))


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which each bit of the result depends on all of x, nearly."""
    for factor in (0x7FEB352D, 0x2C1B3C6D):
        x = x ^ ((x >> 16) & _LOW)
        x = x * factor  # of int32: modulo 2^32
    return x ^ ((x >> 16) & _LOW)
