"""Normal random numbers that are a function of (seed, step, path, element) alone.

So they are the same at every stage and on every number of ranks, and again after a resume. The
64 bits of an element are those of SplitMix64 at its place in the stream of its leaf; two uniform
numbers of 32 bits are made of them, and of these one normal number, by the method of Box and
Muller.

Source: Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; Box and
Muller, "A Note on the Generation of Random Normal Deviates", 1958.
"""

from __future__ import annotations

import hashlib
from math import pi

import torch
from torch import Tensor

_MOD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_LOW = 2**32 - 1


def normal(seed: int, step: Tensor, path: str, first: int, like: Tensor) -> Tensor:
    """Return [n] standard normal numbers, in fp32: of elements `first` and on of the leaf `path`.

    Args:
        seed: any int.
        step: [], an integer: of which update they are.
        path: of the leaf.
        first: the number of the first element in its leaf.
        like: [n]: how many, and on which device.

    Example:
        >>> step, x = torch.tensor(3), torch.empty(4)
        >>> whole = normal(0, step, "w", 0, x)
        >>> torch.equal(whole[2:], normal(0, step, "w", 2, x[2:]))
        True
    """
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    key = _signed(int.from_bytes(digest, "little"))
    key = _mixed(step.to(like.device, torch.int64) * _signed(_GOLDEN) + key)
    places = torch.arange(first, first + like.numel(), device=like.device, dtype=torch.int64)
    bits = _mixed(places * _signed(_GOLDEN) + key)
    one, other = (_shifted(bits, 32), bits & _LOW)
    # In (0, 1] and [0, 1): the logarithm is finite.
    radius = torch.sqrt(-2 * torch.log((one.double() + 1) / 2**32))
    return (radius * torch.cos(2 * pi * other.double() / 2**32)).float()


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64 bits in which each bit of the result depends on all of x."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ _shifted(x, shift)) * _signed(factor)  # of int64: modulo 2^64
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right, with zeros from the left."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _signed(x: int) -> int:
    return x - _MOD if x >= _MOD // 2 else x
