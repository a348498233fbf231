"""Kinds of config values: how each is converted, and how an error describes it.

As in DeepSpeed: 0 and 1 and "true" are bools, 5e8 (a float in JSON) and "500000000" are
ints, "1e-3" is a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Convert = Callable[[Any], Any]
"""Converts a value of JSON; raises ValueError or TypeError for one that is not of the kind."""


def _which(good: Callable[[Any], bool], convert: Convert = lambda value: value) -> Convert:
    """Return a converter that raises ValueError unless the converted value is `good`."""

    def checked(value: Any) -> Any:
        converted = convert(value)
        if not good(converted):
            raise ValueError(value)
        return converted

    return checked


def _one_of(words: Mapping[str, Any]) -> Convert:
    """Return a converter from words, in upper or lower case, to their values."""

    def meant(value: Any) -> Any:
        if str(value).lower() not in words:
            raise ValueError(value)
        return words[str(value).lower()]

    return meant


as_bool = _one_of(
    {
        **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
        **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
    }
)


def as_number(value: Any) -> float:
    """Return a finite number; raise ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def as_int(value: Any) -> int:
    """Return a whole number; raise ValueError for anything else.

    Example:
        >>> as_int(5e8), as_int("16")
        (500000000, 16)
    """
    if isinstance(value, str):
        return int(value)
    if as_number(value) != int(value):
        raise ValueError(value)
    return int(value)


def same(value: Any, default: Any) -> bool:
    """Return whether DeepSpeed would read `value` as `default`."""
    convert = {bool: as_bool, int: as_number, float: as_number}.get(type(default), lambda x: x)
    try:
        return convert(value) == convert(default)
    except ValueError:
        return False


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, (value,) if isinstance(value, str) else value))


_text = _which(lambda value: isinstance(value, str))
_from_0 = _which(lambda number: number >= 0, as_number)
_dtype = _one_of(
    {
        **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), torch.float32),
        **dict.fromkeys(("fp16", "float16", "torch.float16", "half"), torch.float16),
        **dict.fromkeys(("bf16", "bfp16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    }
)

KINDS: dict[str, tuple[Convert, str]] = {
    "bool": (as_bool, "true or false"),
    "count": (_which(lambda number: number >= 1, as_int), "a whole number of 1 or more"),
    "power": (_which(lambda number: 0 <= number < 128, as_int), "a whole number from 0 to 127"),
    "numel": (_which(lambda number: number >= 0, as_int), "a number of elements, 0 or more"),
    "number": (_from_0, "a number of 0 or more"),
    "norm": (lambda value: _from_0(value) or None, "a number of 0 or more; 0 is off"),
    "stage": (_which(lambda number: number in (0, 1, 2, 3), as_int), "0, 1, 2 or 3"),
    "dtype": (_dtype, "fp32, fp16 or bf16"),
    "text": (_text, "a name"),
    "mapping": (_which(lambda value: isinstance(value, Mapping)), "an object { ... }"),
    "place": (_one_of({"none": None, "cpu": "cpu", "nvme": "disk"}), "none, cpu or nvme"),
    "op": (_one_of({"mean": "mean", "sum": "sum"}), "mean or sum"),
    "factor": (_which(lambda number: number > 0, as_number), "a number above 0"),
    "names": (_names, "a list of names"),
}
"""{name: (converter, what a valid value is, for errors)}."""
