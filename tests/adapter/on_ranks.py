"""Tests that are bodies of ranks: what the function says is what every rank does.

    @on_ranks(1, 2, 3)
    @each_stage
    def test_something(rank: int, world_size: int, stage: int) -> None:
        ...

runs the function in one gloo process, then in two, then in three. It may leave out `rank` and
`world_size`; all other arguments are pytest's, and reach every rank.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)
each_stage = pytest.mark.parametrize("stage", STAGES)


def on_ranks(
    *world_sizes: Any, timeout_s: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body(rank, world_size, ...), for each number of ranks, or pytest.param."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.xdist_group("gloo")
        @pytest.mark.parametrize("world_size", world_sizes)
        @functools.wraps(body)
        def test(world_size: int, **given: Any) -> None:
            name = body.__module__, body.__name__
            run_ranks(_run_body, world_size, *name, given, timeout_s=timeout_s)

        # What pytest is to give: the world size, and all that the body asks for but its rank.
        asked = inspect.signature(body).parameters
        rest = [p for name, p in asked.items() if name not in ("rank", "world_size")]
        size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(test)["__signature__"] = inspect.Signature([size, *rest])
        return test

    return decorate


def _run_body(rank: int, world_size: int, module: str, name: str, given: dict[str, Any]) -> None:
    body = getattr(importlib.import_module(module), name).__wrapped__
    known = {"rank": rank, "world_size": world_size, **given}
    body(**{name: known[name] for name in inspect.signature(body).parameters})
