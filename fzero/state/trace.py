"""The order in which modules use units: recorded in one step, then followed, never changed.

    Invalid -> Recording -> Complete -> (another order was seen) -> Invalid
                            Complete -> (the step goes on past its end) -> Recording

A trace is a hint. It decides what is gathered early and what is kept, so it costs or saves time;
what a module needs is gathered whatever the trace says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fzero.state.units import Modules, Units

_PAGE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One step, place by place. Entry `p` is a use of module `modules[p]`.

    `needs[p]` are the units it uses that do not persist, never empty: what does not move has no
    place in the order. `before_numel[p]` counts the elements that entries before p use, and
    `uses[unit]` has the places of a unit, ascending.
    """

    modules: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    before_numel: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Invalid:
    """No order is known; the next step records one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The modules fetched in this step so far, in pages: one more costs a page, not the step."""

    pages: tuple[tuple[int, ...], ...] = ()
    last: tuple[int, ...] = ()

    @property
    def modules(self) -> tuple[int, ...]:
        """All of them, in order."""
        return (*(module for page in self.pages for module in page), *self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """A known order, and where this step stands in it.

    `position` entries were used. Those from there to `cursor` were looked at: what they need is
    live. A fetch looks on from the cursor, so that a step looks at every entry about once.
    """

    order: Order
    position: int = 0
    cursor: int = 0


Trace = Invalid | Recording | Complete


def record_use(trace: Recording, module: int) -> Recording:
    """Append one use."""
    last = (*trace.last, module)
    if len(last) < _PAGE:
        return replace(trace, last=last)
    return Recording(pages=(*trace.pages, last))


def go_on(order: Order, module: int) -> Recording:
    """Record a step that has followed the whole of `order`, and now uses `module`."""
    return Recording(pages=(order.modules,), last=(module,))


def order_of(used: Iterable[int], modules: Modules, units: Units) -> Order:
    """Return the order of `used` (module ids), with what they need as it is known now.

    A unit that was found in the middle of the recorded step counts for the whole of it.

    Example:
        >>> from fzero.state.units import Limits, plan_modules, plan_units
        >>> units = plan_units({"w": 8, "v": 5}, Limits(persistence_threshold_numel=0))
        >>> modules = plan_modules(units, {"net": [], "a": ["w"], "b": ["v"]})
        >>> order = order_of([0, 1, 2, 2, 1], modules, units)
        >>> order.modules, order.uses, order.before_numel
        ((1, 2, 2, 1), ((0, 3), (1, 2)), (0, 8, 13, 18, 26))
    """
    moving = [units.moving(needs) for needs in modules.needs]
    entries = [(module, moving[module]) for module in used if moving[module]]
    uses: list[list[int]] = [[] for _ in units.names]
    for place, (_, needs) in enumerate(entries):
        for unit in needs:
            uses[unit].append(place)
    return Order(
        modules=tuple(module for module, _ in entries),
        needs=tuple(needs for _, needs in entries),
        before_numel=(0, *accumulate(units.numel_of(needs) for _, needs in entries)),
        uses=tuple(map(tuple, uses)),
    )


def expects(trace: Complete, module: int) -> bool:
    """Whether `module` is what the order has next."""
    modules, at = trace.order.modules, trace.position
    return at < len(modules) and modules[at] == module


def next_place(trace: Complete) -> Complete:
    """One use further."""
    return Complete(order=trace.order, position=trace.position + 1, cursor=trace.cursor)


def reuse_distance(trace: Trace, unit: int) -> float:
    """Elements that other entries use before `unit` is used again; inf if it is not, or unknown."""
    if not isinstance(trace, Complete):
        return math.inf
    place = _next_use(trace, unit)
    before = trace.order.before_numel
    return math.inf if place is None else before[place] - before[trace.position]


def distance_around(trace: Trace, unit: int) -> float:
    """Like `reuse_distance`, if the order comes again when it ends; inf if it never uses `unit`."""
    if not isinstance(trace, Complete) or not trace.order.uses[unit]:
        return math.inf
    before, first = trace.order.before_numel, trace.order.uses[unit][0]
    return min(reuse_distance(trace, unit), before[-1] - before[trace.position] + before[first])


def look_ahead(
    trace: Complete, codes: bytes, numels: Sequence[int], room_numel: int
) -> tuple[Complete, tuple[int, ...]]:
    """Return the next units in order that are not live, as many as fit, and the moved cursor.

    `codes[unit]` is 0 for what is not live. Units are taken in order, so the first one that does
    not fit ends it: a unit larger than the whole bucket is never gathered early.
    """
    needs = trace.order.needs
    chosen: dict[int, None] = {}
    cursor = trace.cursor
    while cursor < len(needs):
        for unit in needs[cursor]:
            if codes[unit] or unit in chosen:
                continue
            if numels[unit] > room_numel:
                return _at_cursor(trace, cursor), tuple(chosen)
            room_numel -= numels[unit]
            chosen[unit] = None
        cursor += 1
    return _at_cursor(trace, cursor), tuple(chosen)


def rewind(trace: Trace, dropped: Iterable[int]) -> Trace:
    """Take the cursor back to the next use of what was just freed."""
    if not isinstance(trace, Complete):
        return trace
    places = [place for unit in dropped if (place := _next_use(trace, unit)) is not None]
    return _at_cursor(trace, min([trace.cursor, *places]))


def expected_order(order: Order, modules: Modules, units: Units) -> list[str]:
    """One line for each entry: equal lines on all ranks mean equal gathers in an equal order.

    Example:
        >>> from fzero.state.units import Limits, plan_modules, plan_units
        >>> units = plan_units({"w": 8, "v": 5}, Limits(persistence_threshold_numel=0))
        >>> modules = plan_modules(units, {"a": ["w"], "b": ["v", "w"]})
        >>> expected_order(order_of([0, 1], modules, units), modules, units)
        ['0: a uses w (8)', '1: b uses v (5), w (8)']
    """
    sized = [f"{name} ({numel})" for name, numel in zip(units.names, units.numels, strict=True)]
    return [
        f"{place}: {modules.names[module] or '(root)'} uses {', '.join(sized[u] for u in needs)}"
        for place, (module, needs) in enumerate(zip(order.modules, order.needs, strict=True))
    ]


def _at_cursor(trace: Complete, cursor: int) -> Complete:
    return trace if cursor == trace.cursor else replace(trace, cursor=cursor)


def _next_use(trace: Complete, unit: int) -> int | None:
    places = trace.order.uses[unit]
    at = bisect_left(places, trace.position)
    return places[at] if at < len(places) else None
