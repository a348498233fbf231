"""Checks of what a user gives for an option. Each raises one error, which names the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fzero.errors import LayoutError


def require(
    name: str,
    value: Any,
    good: Callable[[Any], bool],
    wanted: str,
    *,
    cause: str = "a value of another kind or out of range.",
) -> None:
    """Raise `LayoutError`, naming the option and what is wanted, for a value that is not `good`.

    Example:
        >>> require("steps", 2, is_count, "an int of 1 or more")
    """
    if not good(value):
        raise LayoutError(f"{name}={value!r}.", cause=cause, fix=f"give {wanted}.")


def check_flags(**flags: Any) -> None:
    """Raise `LayoutError` for what is no bool: "no" would count as True."""
    for name, value in flags.items():
        cause = "a word from a config file or a command line."
        require(name, value, lambda x: isinstance(x, bool), "True or False", cause=cause)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; True and False are none here."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (isinstance(value, int) or math.isfinite(value))


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above zero."""
    return is_number(value) and value > 0


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is an int of `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
