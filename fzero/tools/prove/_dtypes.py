"""Which dtypes hold all values of another one, and which numbers a dtype holds."""

from __future__ import annotations

from math import isfinite

import torch

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)

_HELD_BY: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bool: (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_FLOATS),
    torch.uint8: (torch.int16, torch.int32, torch.int64, *_FLOATS),
    torch.int8: (torch.int16, torch.int32, torch.int64, *_FLOATS),
    torch.int16: (torch.int32, torch.int64, torch.float32, torch.float64),
    torch.int32: (torch.int64, torch.float64),
    torch.float16: (torch.float32, torch.float64, *_COMPLEX),
    torch.bfloat16: (torch.float32, torch.float64, *_COMPLEX),
    torch.float32: (torch.float64, *_COMPLEX),
    torch.float64: (torch.complex128,),
    torch.complex64: (torch.complex128,),
}

ADDS = frozenset((*_FLOATS, *_COMPLEX, torch.int64))
"""Dtypes whose sums are read as sums of numbers: floats are not rounded, int64 does not overflow.
Narrower integers wrap around."""
DIVIDES = frozenset((*_FLOATS, *_COMPLEX))
REALS = frozenset(_FLOATS)


def holds(after: torch.dtype, before: torch.dtype) -> bool:
    """Whether every value of `before` is one of `after`.

    Example:
        >>> holds(torch.float32, torch.bfloat16), holds(torch.bfloat16, torch.float32)
        (True, False)
    """
    return before is after or after in _HELD_BY.get(before, ())


def holds_number(dtype: torch.dtype, number: object) -> bool:
    """Whether a number of Python is one of a dtype: of a float one, up to its rounding.

    Example:
        >>> holds_number(torch.int64, 0.5), holds_number(torch.float16, 1e6)
        (False, False)
    """
    if type(number) is bool:
        return True
    if not isinstance(number, int | float) or not isfinite(number):
        return False
    if dtype is torch.bool:
        return number in (0, 1)
    if not (dtype.is_floating_point or dtype.is_complex):
        about = torch.iinfo(dtype)
        return number == int(number) and about.min <= number <= about.max
    if dtype not in DIVIDES:
        return False
    limits = torch.finfo(dtype)
    return number == 0 or limits.smallest_normal <= abs(number) <= limits.max
