"""A small coordinator for the transition tables, and what plays events to it."""

from __future__ import annotations

from typing import Any

from fzero.state.coordinator import (
    CoordinatorState,
    begin_step,
    end_step,
    fetch,
    gathered,
    new_coordinator,
    release,
)
from fzero.state.coordinator_effects import Wait
from fzero.state.trace import Complete
from fzero.state.units import Limits

# Units 0 to 4 of 1, 2, 4, 8 and 16 elements; module 0 has none, 1 to 4 own one each, 5 is a block
# that is called around 1 and 2 and has unit 4, and 6 is tied to 1.
NUMELS = {"u0": 1, "u1": 2, "u2": 4, "u3": 8, "u4": 16}
NEEDS = {
    "": [],
    "a": ["u0"],
    "b": ["u1"],
    "c": ["u2"],
    "d": ["u3"],
    "block": ["u4"],
    "tied": ["u0", "u3"],
}
ROOT, A, B, C, D, BLOCK, TIED = range(7)


def made(**limits: int) -> CoordinatorState:
    """A coordinator that keeps and prefetches nothing, unless `limits` say so."""
    none = {
        "prefetch_bucket_numel": 0,
        "max_reuse_distance_numel": 0,
        "persistence_threshold_numel": 0,
    }
    return new_coordinator(NUMELS, NEEDS, Limits(**{**none, **limits}))


def play(s: CoordinatorState, *events: Any) -> tuple[CoordinatorState, list[Any]]:
    """Run events, (transition, *arguments) each, and every Wait; return the effects of all."""
    seen: list[Any] = []
    for transition, *args in events:
        s, effects = transition(s, *args)
        seen += effects
        for effect in effects:
            if isinstance(effect, Wait):
                s, nothing = gathered(s, effect.ids)
                assert nothing == ()
    return s, seen


def calls(*modules: int) -> list[Any]:
    """One module after the other, each fetched and released."""
    return [(do, module) for module in modules for do in (fetch, release)]


def trained(s: CoordinatorState, *modules: int) -> CoordinatorState:
    """`s` with a complete order of these calls, at its start."""
    s, _ = play(s, (begin_step,), *calls(*modules), (end_step,), (begin_step,))
    assert isinstance(s.trace, Complete)
    return s


def of(kind: type, effects: list[Any]) -> list[tuple[int, ...]]:
    return [effect.ids for effect in effects if isinstance(effect, kind)]
