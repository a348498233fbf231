"""Functions of an engine's driver as methods of the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from fzero.adapter.driver import Driver

P = ParamSpec("P")
R = TypeVar("R")


def of_driver(function: Callable[Concatenate[Driver, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return the method of an engine that calls `function` with the engine's driver."""

    @functools.wraps(function)
    def method(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(engine._driver, *args, **kwargs)

    return method
