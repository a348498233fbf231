"""What a value of a config must be, how to say so, and what is made of it.

As DeepSpeed takes them: 0 and 1 and "true" are bools, 5e8 (a float in JSON) and "500000000" are
ints, "1e-3" is a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

_DTYPES = {
    **{name: torch.float32 for name in ("fp32", "float32", "torch.float32", "float")},
    **{name: torch.float16 for name in ("fp16", "float16", "torch.float16", "half")},
    **{name: torch.bfloat16 for name in ("bf16", "bfp16", "bfloat16", "torch.bfloat16")},
}
_BOOLS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def as_bool(value: Any) -> bool:
    """Return the bool that `value` is for DeepSpeed; raise ValueError if it is none.

    Example:
        >>> as_bool(1), as_bool("False")
        (True, False)
    """
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(value)


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
    """Whether `value` is `default`, which DeepSpeed would read it as."""
    convert: Any = {bool: as_bool, int: as_number, float: as_number}.get(type(default), _itself)
    try:
        return convert(value) == convert(default)
    except ValueError:
        return False


def _itself(value: Any) -> Any:
    return value


def _at_least(bound: int, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        made = convert(value)
        if made < bound:
            raise ValueError(value)
        return made

    return checked


def _stage(value: Any) -> int:
    stage = as_int(value)
    if stage not in (0, 1, 2, 3):
        raise ValueError(value)
    return stage


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, str) or value.lower() not in _DTYPES:
        raise ValueError(value)
    return _DTYPES[value.lower()]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(value)
    return dict(value)


def _place(value: Any) -> Any:
    places = {"none": None, "cpu": "cpu", "nvme": "disk"}
    if not isinstance(value, str) or value not in places:
        raise ValueError(value)
    return places[value]


def _op(value: Any) -> str:
    if value not in ("mean", "sum"):
        raise ValueError(value)
    return value


def _factor(value: Any) -> float:
    if not as_number(value) > 0:
        raise ValueError(value)
    return as_number(value)


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        raise ValueError(value)
    return tuple(_text(name) for name in names)


KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bool": (as_bool, "true or false"),
    "count": (_at_least(1, as_int), "a whole number of 1 or more"),
    "whole": (_at_least(0, as_int), "a whole number of 0 or more"),
    "numel": (_at_least(0, as_int), "a number of elements, 0 or more"),
    "number": (_at_least(0, as_number), "a number of 0 or more"),
    "norm": (lambda x: _at_least(0, as_number)(x) or None, "a number of 0 or more; 0 is off"),
    "stage": (_stage, "0, 1, 2 or 3"),
    "dtype": (_dtype, "fp32, fp16 or bf16"),
    "text": (_text, "a name"),
    "mapping": (_mapping, "an object { ... }"),
    "place": (_place, "none, cpu or nvme"),
    "op": (_op, "mean or sum"),
    "factor": (_factor, "a number above 0"),
    "names": (_names, "a list of names"),
}
"""By name: what converts a value, raising ValueError or TypeError, and what to give instead."""
