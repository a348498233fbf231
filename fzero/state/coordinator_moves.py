"""The moves that the coordinator's transitions are made of. Each returns (state, effects)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from fzero.errors import explain
from fzero.state import residency, trace
from fzero.state.coordinator_effects import (
    Agree,
    Drain,
    Effect,
    Gather,
    Prefetch,
    Release,
    Wait,
    Warn,
)
from fzero.state.coordinator_record import CoordinatorState
from fzero.state.residency import Status
from fzero.state.trace import Complete, Invalid, Recording

Transition = tuple[CoordinatorState, tuple[Effect, ...]]


def gather(s: CoordinatorState, ids: Iterable[int]) -> Transition:
    """Start the gathers of what is not live of `ids`; none of them is ahead any more."""
    wanted = tuple(dict.fromkeys(ids))
    claimed = residency.claim(s.residency, s.units, wanted)
    missing = tuple(unit for unit in wanted if not claimed.codes[unit])
    if not missing:
        return (s if claimed is s.residency else replace(s, residency=claimed)), ()
    launched = residency.launch(claimed, s.units, missing)
    return replace(s, residency=launched), (Gather(missing),)


def wait(s: CoordinatorState, ids: Iterable[int]) -> tuple[Effect, ...]:
    """Wait for what is in flight of `ids`."""
    status = s.residency.status
    late = tuple(unit for unit in dict.fromkeys(ids) if status(unit) is Status.IN_FLIGHT)
    return (Wait(late),) if late else ()


def prefetch(s: CoordinatorState) -> Transition:
    """Start the gathers that come next in a complete order, as far as there is room."""
    if not isinstance(s.trace, Complete):
        return s, ()
    held, limits = s.residency, s.limits
    room_numel = min(
        limits.max_live_parameters_numel - held.live_numel,
        limits.prefetch_bucket_numel - held.ahead_numel,
    )
    followed, ids = trace.look_ahead(s.trace, held.codes, s.units.numels, room_numel)
    if not ids:
        return (s if followed is s.trace else replace(s, trace=followed)), ()
    launched = residency.launch(held, s.units, ids, ahead=True)
    return replace(s, trace=followed, residency=launched), (Prefetch(ids),)


def drop(s: CoordinatorState, ids: Collection[int]) -> Transition:
    """Free `ids`, all of them live: drain what is in flight, release what is available."""
    if not ids:
        return s, ()
    flying = tuple(u for u in ids if s.residency.status(u) is Status.IN_FLIGHT)
    there = tuple(u for u in ids if s.residency.status(u) is Status.AVAILABLE)
    s = replace(
        s,
        residency=residency.drop(s.residency, s.units, ids),
        trace=trace.rewind(s.trace, ids),
    )
    drained = (Drain(flying),) if flying else ()
    return s, (*drained, *((Release(there),) if there else ()))


def drain(s: CoordinatorState) -> Transition:
    """Free all that is live and idle."""
    return drop(s, _idle(s))


def between_steps(s: CoordinatorState) -> Transition:
    """Free what is idle; in a window, only what the next step uses too late, or has no room."""
    gone = too_far(s, _idle(s)) if s.repeats else _idle(s)
    return drop(s, (*gone, *surplus(s, gone)))


def too_far(s: CoordinatorState, ids: Iterable[int]) -> tuple[int, ...]:
    """Those of `ids` that the order does not use within max_reuse_distance elements."""
    reach_numel = s.limits.max_reuse_distance_numel
    return tuple(unit for unit in ids if _distance(s, unit) >= reach_numel)


def surplus(s: CoordinatorState, gone: Collection[int] = ()) -> tuple[int, ...]:
    """The idle units that must go for live elements to fit, those used again last first.

    `gone` are units that go anyway.
    """
    over_numel = s.residency.live_numel - s.units.numel_of(gone)
    over_numel -= s.limits.max_live_parameters_numel
    if over_numel <= 0:
        return ()
    idle = [unit for unit in _idle(s) if unit not in gone]
    idle.sort(key=lambda unit: (_distance(s, unit), unit), reverse=True)
    chosen: list[int] = []
    for unit in idle:
        if over_numel <= 0:
            break
        chosen.append(unit)
        over_numel -= s.units.numels[unit]
    return tuple(chosen)


def advance(s: CoordinatorState) -> Transition:
    """Invalid -> Recording -> Complete, at place 0; one that has just become complete: Agree."""
    if isinstance(s.trace, Invalid):
        return replace(s, trace=Recording()), ()
    if isinstance(s.trace, Complete):
        return replace(s, trace=Complete(order=s.trace.order)), ()
    if s.trace == Recording():  # a step in which nothing ran has no order to follow
        return s, ()
    order = trace.order_of(s.trace.modules, s.modules, s.units)
    lines = trace.expected_order(order, s.modules, s.units)
    return replace(s, trace=Complete(order=order)), (Agree(tuple(lines)),)


def follow(s: CoordinatorState, module: int) -> Transition:
    """Record the use of `module`, or go one place on in the order, or find that it has changed.

    A step that goes on where its order ended has not changed it: the longer one is recorded.
    """
    if isinstance(s.trace, Recording):
        return replace(s, trace=trace.record_use(s.trace, module)), ()
    moves = s.units.moving(s.modules.needs[module])
    if not isinstance(s.trace, Complete) or not moves:
        return s, ()
    if trace.expects(s.trace, module):
        return replace(s, trace=trace.next_place(s.trace)), ()
    order, at = s.trace.order, s.trace.position
    if at == len(order.modules):  # all of it was as expected: a forward alone had been recorded
        return replace(s, trace=trace.go_on(order, module)), ()
    expected = s.text(order.modules[at : at + 1])
    return invalidate(s, f"{s.text([module])} came at place {at}, where the order has {expected}")


def invalidate(s: CoordinatorState, seen: str) -> Transition:
    """Forget the order, and say so once."""
    message = explain(
        f"the order in which modules use their parameters has changed: {seen}. Every value is "
        "right; nothing is prefetched until a whole step has been recorded again.",
        cause="a branch that depends on the data, layers that are skipped at random, or an "
        "evaluation that runs the modules in another order.",
        fix="nothing, if it is rare. Else make the module around what varies a leaf module, so "
        "that it is gathered as one.",
    )
    return replace(s, trace=Invalid()), (Warn(message),)


def _distance(s: CoordinatorState, unit: int) -> float:
    measure = trace.distance_around if s.repeats else trace.reuse_distance
    return measure(s.trace, unit)


def _idle(s: CoordinatorState) -> tuple[int, ...]:
    busy = s.in_use | s.units.persistent
    return tuple(unit for unit in s.residency.live if unit not in busy)
