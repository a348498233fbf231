"""Tests that are bodies of ranks: what the function says is what every rank does.

    @at_places(1, 2, 3)
    def test_something(at: Place) -> None:
        engine, plain = at.both(Net)
        ...

runs the function in gloo processes, at chosen pairs of a number of ranks and a stage (`on_ranks`:
at chosen numbers of ranks). It may ask for `at`, or for `rank`, `world_size` and `stage`; all other
arguments are pytest's, and reach every rank. `virtually` does the same on virtual ranks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import fzero
from fzero.adapter import Engine
from tests.adapter.plain import STAGES as STAGES
from tests.adapter.plain import Draw, Make, OptimizerOf, Reference, engine_of, sgd_of
from tests.ranks import run_ranks

each_stage = pytest.mark.parametrize("stage", STAGES)


class Place(NamedTuple):
    """A rank, of how many, and the stage of its engines; what most tests make there."""

    rank: int
    ranks: int
    stage: int = 0

    @property
    def is_lazy(self) -> bool:
        """Whether parameters are placeholders between steps."""
        return self.stage == 3 and self.ranks > 1

    def draw(self, number: int) -> Draw:
        return Draw(self.rank, number)

    def engine(self, make: Make, optimizer_of: OptimizerOf = sgd_of, **options: Any) -> Engine:
        return engine_of(make, self.stage, optimizer_of, **options)

    def plain(self, make: Make, optimizer_of: OptimizerOf = sgd_of) -> Reference:
        return Reference(make, self.ranks, optimizer_of)

    def both(
        self, make: Make, optimizer_of: OptimizerOf = sgd_of, **options: Any
    ) -> tuple[Engine, Reference]:
        return self.engine(make, optimizer_of, **options), self.plain(make, optimizer_of)


def places_of(*world_sizes: int) -> list[Any]:
    """(ranks, stage): each number of ranks and each stage, and most pairs of them on two ranks.

    One rank holds the same at stages 0 to 2; on more than two, what is new is how shards are
    padded and which rank is meant. `make nightly` has the other pairs, too.
    """
    slow = pytest.mark.slow
    both = {2, 3} <= {*world_sizes}
    usual = {1: (3,), 2: (0, 2, 3), 3: (1, 3)} if both else {1: (3,)}
    return [
        pytest.param(size, stage, marks=() if stage in usual.get(size, STAGES) else slow)
        for size in world_sizes
        for stage in STAGES
    ]


def at_places(*world_sizes: int, timeout_s: float = 60.0) -> Callable[..., Any]:
    """Make a test of a body(at, ...), for pairs of a number of ranks and a stage."""
    return _test("world_size, stage", places_of(*world_sizes), functools.partial(_real, timeout_s))


def on_ranks(*world_sizes: Any, timeout_s: float = 60.0) -> Callable[..., Any]:
    """Make a test of a body(rank, world_size, ...), for each number of ranks, or pytest.param."""
    return _test("world_size", world_sizes, functools.partial(_real, timeout_s))


def virtually(*world_sizes: int) -> Callable[..., Any]:
    """Make a test of a body of virtual ranks; one rank is the process itself."""
    return _test("world_size", world_sizes, _virtual)


Run = Callable[[Callable[..., None], int, dict[str, Any]], None]


def _test(names: str, values: Any, run: Run) -> Callable[..., Any]:
    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize(names, values)
        @functools.wraps(body)
        def test(world_size: int, **given: Any) -> None:
            run(body, world_size, given)

        # What pytest is to give: the world size, and all that the body asks for but its place.
        asked = inspect.signature(body).parameters
        rest = [p for name, p in asked.items() if name not in ("at", "rank", "world_size")]
        first = ["world_size", *(["stage"] if "stage" in names and "stage" not in asked else [])]
        made = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in first]
        vars(test)["__signature__"] = inspect.Signature([*made, *rest])
        return test if run is _virtual else pytest.mark.xdist_group("gloo")(test)

    return decorate


def _real(
    timeout_s: float, body: Callable[..., None], world_size: int, given: dict[str, Any]
) -> None:
    run_ranks(_run_body, world_size, body.__module__, body.__name__, given, timeout_s=timeout_s)


def _virtual(body: Callable[..., None], world_size: int, given: dict[str, Any]) -> None:
    def each() -> None:
        _call(body, fzero.world().rank, world_size, given)

    each() if world_size == 1 else fzero.simulate(each, world_size=world_size)()


def _run_body(rank: int, world_size: int, module: str, name: str, given: dict[str, Any]) -> None:
    body = getattr(importlib.import_module(module), name).__wrapped__
    _call(body, rank, world_size, given)


def _call(body: Callable[..., None], rank: int, world_size: int, given: dict[str, Any]) -> None:
    at = Place(rank, world_size, given.get("stage", 0))
    known = {"rank": rank, "world_size": world_size, "at": at, **given}
    body(**{name: known[name] for name in inspect.signature(body).parameters})
