"""Decide from the bits of its terms whether a sum is exact in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST = -1000.0  # log2: below it float64 has fewer bits
_SPARE_BITS = 2  # numbers that use all bits of their dtype were most likely rounded themselves


def is_exact(terms: Sequence[Tensor], divisor: int, dtype: torch.dtype) -> bool:
    """Whether sum(terms) / divisor is exact in `dtype`, in any order, elementwise.

    x = k 2^e with an odd integer k. With the smallest e of the terms, u = 2^e, every partial sum is
    a multiple of u of at most sum(|x|): it is exact if sum(|x|) / u fits into the significand. The
    quotient is if the odd part of the divisor divides every x / u.

    Args:
        terms: of one shape [*t], any dtype; compared in float64.
        divisor: what the sum, or any part of it, is divided by; at least 1.
        dtype: in which it is added up.

    Example:
        >>> thirds = [torch.tensor([3.0, 0.75]), torch.tensor([6.0, 1.5])]
        >>> is_exact(thirds, 3, torch.float32), is_exact(thirds, 5, torch.float32)
        (True, False)
        >>> is_exact([torch.tensor([1e8]), torch.tensor([0.5])], 1, torch.float32)
        False
    """
    values = torch.stack([term.detach().double().flatten() for term in terms])
    if not values.isfinite().all():
        return False
    mantissa, exponent = torch.frexp(values)
    whole = (mantissa * 2.0**53).to(torch.int64)
    lowest = whole & -whole  # the bit that is set last; 0 for 0
    low = exponent.double() + torch.log2(lowest.double()) - 53
    low = torch.where(whole == 0, torch.inf, low).amin(0)  # [numel]: log2(u)
    bits = torch.log2(values.abs().sum(0)) - low
    room = 1 - int(torch.log2(torch.tensor(torch.finfo(dtype).eps))) - _SPARE_BITS
    some = low.isfinite()
    if not bool(((bits[some] < room) & (low[some] > _SMALLEST)).all()):
        return False
    units = (values[:, some] * torch.exp2(-low[some])).to(torch.int64)
    return not bool((units % _odd_part(divisor)).any())


def _odd_part(number: int) -> int:
    return number // (number & -number)
