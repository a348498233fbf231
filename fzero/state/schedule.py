"""The schedule of stage 3: in which order units are gathered and reduced, recorded and replayed.

One pass of a program, a forward or a backward, is a `Program`: the units that it used and the
gradients that it reduced, in that order. The first pass records it; all ranks hold the same record.
Later passes replay its `Plan`, which says when each collective starts, so that no rank has to ask
the others what comes next.

A schedule decides when a unit is gathered, never whether: a pass that does something else is still
right, and costs more.

Source: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 6.2 (a prefetcher that
follows the order it has traced).
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from itertools import zip_longest

Events = tuple[int, ...]
"""`u` is a use of unit u, `~u` (negative) the reduction of its gradient."""


FORWARD, BACKWARD = 0, 1
"""The phases of a pass."""

Place = tuple[int, int]
"""(number of a pass since the last update, its phase)"""

Phases = Mapping[Place, Events]
"""What one rank did in each phase."""


@dataclass(frozen=True)
class Program:
    """What one pass did, in order. Equal on every rank of an axis."""

    events: Events = ()

    @cached_property
    def digest(self) -> int:
        """A number that differs, almost surely, between programs that differ."""
        return zlib.crc32(repr(self.events).encode())


@dataclass(frozen=True, slots=True)
class Schedule:
    """The programs that a state has recorded: pass by pass between two updates.

    `passes[i]` are the forward and the backward of the i-th pass since the last update, as far as
    they are known. A pass beyond the last one is expected to be like it. They number the units of
    all states of the pass, whose sizes are `units`; `others` are those of passes with other states.

    Example:
        >>> schedule = with_program(Schedule(), 0, 1, Program((0, 1, ~1, ~0)))
        >>> expected(schedule, 7, 1).events
        (0, 1, -2, -1)
        >>> expected(schedule, 0, 0) is None
        True
    """

    passes: tuple[tuple[Program | None, Program | None], ...] = ()
    units: tuple[int, ...] = ()
    others: tuple[Schedule, ...] = ()


@lru_cache(maxsize=64)
def backwards(count: int) -> Program:
    """Return the program that reduces each of `count` units, the last one first.

    Example:
        >>> backwards(3).events
        (-3, -2, -1)
    """
    return Program(tuple(~unit for unit in range(count - 1, -1, -1)))


def expected(schedule: Schedule, index: int, phase: int) -> Program | None:
    """Return the program of pass `index` in `phase` (0 forward, 1 backward); None if unknown."""
    known = schedule.passes[: index + 1]
    return next((one[phase] for one in reversed(known) if one[phase] is not None), None)


_OTHERS = 16  # of which a schedule is kept: those that were used last


def of_units(schedule: Schedule, units: tuple[int, ...]) -> Schedule:
    """Return the schedule of passes over units of these sizes, empty if there was none.

    Example:
        >>> one = with_program(of_units(Schedule(), (4, 4)), 0, 1, Program((0, 1, ~1, ~0)))
        >>> two = of_units(one, (4,))
        >>> two.passes, of_units(two, (4, 4)).passes == one.passes
        ((), True)
    """
    if schedule.units == units:
        return schedule
    known = (replace(schedule, others=()), *schedule.others)
    found = next((one for one in known if one.units == units), Schedule(units=units))
    rest = tuple(one for one in known if one.units != units and one.passes)
    return replace(found, others=rest[:_OTHERS])


def with_program(schedule: Schedule, index: int, phase: int, program: Program) -> Schedule:
    """Return the schedule that expects `program` for pass `index` in `phase`."""
    passes = list(schedule.passes)
    while len(passes) <= index:
        passes.append((None, None))
    forward, backward = passes[index]
    passes[index] = (forward, program) if phase else (program, backward)
    return replace(schedule, passes=tuple(passes))


def union(programs: Sequence[Events], sync_point: int | None = None) -> Program:
    """Return a program of which each of `programs` is a part, in the same order.

    `sync_point` is an event at which ranks wait for each other: the k-th of one program is the k-th
    of every other.

    Example:
        >>> union([(0, 1, 3), (0, 2, 3)]).events
        (0, 1, 2, 3)
        >>> union([(0, 9, 1), (9, 0, 1)], sync_point=9).events
        (0, 9, 0, 1)
    """
    parts = [_split(events, sync_point) for events in dict.fromkeys(programs)]
    whole: list[int] = []
    for number, segments in enumerate(zip_longest(*parts, fillvalue=())):
        whole += [sync_point] if number and sync_point is not None else []
        merged: Sequence[int] = ()
        for segment in segments:
            merged = _merged(merged, segment)
        whole += merged
    return Program(tuple(whole))


def joined(everyone: Sequence[Phases], sync_point: int) -> dict[Place, Program]:
    """Return, for each phase that any rank was in, the union of what the ranks did in it."""
    places = sorted({place for phases in everyone for place in phases})
    return {
        place: union([phases[place] for phases in everyone if place in phases], sync_point)
        for place in places
    }


def _split(events: Events, sync_point: int | None) -> list[Events]:
    segments: list[Events] = [()]
    for event in events:
        if event == sync_point:
            segments.append(())
        else:
            segments[-1] += (event,)
    return segments


def _merged(whole: Sequence[int], events: Sequence[int]) -> list[int]:
    """The shortest sequence, or nearly, of which both are parts."""
    merged: list[int] = []
    matcher = SequenceMatcher(None, whole, events, autojunk=False)
    for tag, low, high, begin, end in matcher.get_opcodes():
        merged += whole[low:high]
        if tag != "equal":
            merged += events[begin:end]
    return merged


@dataclass(frozen=True, slots=True)
class UnitUse:
    """One use of a unit, and the collectives around it, all in this order.

    frees: units whose full values go before anything starts.
    gathers: units whose gather starts now because this use needs them.
    ahead: units whose gather starts now because the uses that follow need them.
    reduces: units whose gradients are reduced before the next step begins.
    """

    unit: int
    frees: tuple[int, ...]
    gathers: tuple[int, ...]
    ahead: tuple[int, ...]
    reduces: tuple[int, ...]


@dataclass(frozen=True)
class PlannedProgram:
    """The uses of a program. Use 0 is before the first use."""

    steps: tuple[UnitUse, ...]

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        places: dict[int, list[int]] = {}
        for place, step in enumerate(self.steps):
            places.setdefault(step.unit, []).append(place)
        return places

    def next_use(self, unit: int, after: int) -> int | None:
        """Return the first step after step `after` that uses `unit`; None if there is none."""
        return next((at for at in self._places.get(unit, ()) if at > after), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many elements stage 3 gathers early, and what it never lets go between updates.

    Attributes:
        prefetch_numel: gathered before it is needed: the unit that comes next, and those after it
            while they fit. 0 gathers nothing early.
        keeps: whether a unit that was gathered stays until the end of the backward, so that it is
            gathered once; else it goes when another unit is used.
    """

    prefetch_numel: int = 1
    keeps: bool = False


@lru_cache(maxsize=256)
def plan_program(
    program: Program, numels: tuple[int, ...], held: frozenset[int], limits: Limits
) -> PlannedProgram:
    """Return when each collective of `program` starts and when full values go.

    `held` are units that are whole before the pass and stay so. Without `keeps` at most two units
    that are not held are whole at once if one is gathered early: the one in use and the next.

    Example:
        >>> steps = plan_program(Program((0, 1, 2)), (4, 4, 4), frozenset(), Limits()).steps
        >>> [(s.unit, s.frees, s.gathers, s.ahead) for s in steps]
        [(-1, (), (), ()), (0, (), (0,), (1,)), (1, (0,), (), (2,)), (2, (1,), (), ())]
    """
    uses = [event for event in program.events if event >= 0]
    reduces = _reduces_after(program.events)
    steps = [UnitUse(-1, (), (), (), reduces[0])]
    live: list[int] = []  # whole or on the way, and not held
    early: list[int] = []  # those of them that were asked for early and not used yet
    for place, unit in enumerate(uses):
        following = next((u for u in uses[place + 1 :] if u != unit and u not in held), None)
        soon = {unit, *early, following}
        frees = () if limits.keeps else tuple(u for u in live if u not in soon)
        live = [u for u in live if u not in frees]
        gathers = () if unit in held or unit in live else (unit,)
        live += gathers
        early = [u for u in early if u != unit]
        waits = {*early, *(u for u in live if u == following)}  # whole, for uses that follow
        room_numel = limits.prefetch_numel - sum(numels[u] for u in waits)
        ahead = _ahead(uses, place + 1, held.union(live), numels, room_numel, bool(waits))
        live += ahead
        early += ahead
        steps.append(UnitUse(unit, frees, gathers, ahead, reduces[place + 1]))
    return PlannedProgram(tuple(steps))


def _reduces_after(events: Events) -> list[tuple[int, ...]]:
    """The reductions before the first use, after it, after the second use, and so on."""
    found: list[list[int]] = [[]]
    for event in events:
        if event >= 0:
            found.append([])
        else:
            found[-1].append(~event)
    return [tuple(units) for units in found]


def _ahead(
    uses: Sequence[int],
    place: int,
    here: Collection[int],
    numels: Sequence[int],
    room_numel: int,
    some: bool,
) -> tuple[int, ...]:
    """The next units to gather, while they fit; one that is too large only if there is no other."""
    chosen: list[int] = []
    while place < len(uses) and room_numel > 0 and len(here) + len(chosen) < len(numels):
        unit, place = uses[place], place + 1
        if unit in here or unit in chosen:
            continue
        if (some or chosen) and numels[unit] > room_numel:
            break
        chosen.append(unit)
        room_numel -= numels[unit]
    return tuple(chosen)
