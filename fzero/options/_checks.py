"""The checks of values that several options share."""

from __future__ import annotations

from typing import Any

import torch

from fzero.errors.check import is_count
from fzero.options._record import ValueCheck

ZERO = "zero_optimization."
"""The section of DeepSpeed's config that most keys are in."""


def one_of(*values: Any, wanted: str = "") -> ValueCheck:
    """Return a check that accepts these values only, compared with their type: 1 is not True."""
    good = {(type(value), value) for value in values}

    def is_one(x: Any) -> bool:
        return isinstance(x, bool | str | torch.dtype | None) and (type(x), x) in good

    return ValueCheck(is_one, wanted or " or ".join(map(repr, values)))


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLAG = ValueCheck(
    lambda x: isinstance(x, bool), "True or False", "a word from a config file or a command line."
)
DTYPE = one_of(None, *_DTYPES, wanted=f"None or one of {_DTYPES}")
NUMEL = ValueCheck(lambda x: is_count(x, 0), "a number of elements: an int of 0 or more")


def of_path(name: str) -> ValueCheck:
    """Return the check for a function of a path, or None."""
    wanted = f"a function of a leaf's path: {name}=lambda path: ..."
    return ValueCheck(lambda x: x is None or callable(x), wanted, "a list of paths, or a prefix.")
