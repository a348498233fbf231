"""Which units of a model are gathered, on the way or pinned, on one rank.

A unit is missing, flying (its gather has started) or gathered. A pinned unit is not freed by any
plan. Values that crossed ranks rounded (autocast, int8 blocks) are `inexact`: they serve a forward
or a backward, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fzero.state.effects import Effect, Free, Gather, Wait, replaced
from fzero.state.schedule import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Static facts about the units of a model that the protocol needs.

    Attributes:
        numels: elements of each, with padding.
        persistent: pinned from the first pass after an update to the next update.
        rounds: those whose values may cross ranks rounded.
        bounded: those whose reduction may wait where it starts: for one before it, as few
            reduce-scatters run at once, or for the other ranks.
        limits: what the schedule is planned by.
        gathers: whether there is anything to gather (stage 3); else gradients are reduced only.
    """

    numels: tuple[int, ...]
    persistent: tuple[int, ...] = ()
    rounds: frozenset[int] = frozenset()
    bounded: frozenset[int] = frozenset()
    limits: Limits = field(default_factory=Limits)
    gathers: bool = True


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Where the values of each unit of a model are.

    Attributes:
        model: its number.
        units: static facts about its units.
        rounds: whether what is gathered now may be rounded.
        gathered: the units whose full values are here, the least recently used first.
        flying: those whose gather has started.
        pinned: those that no plan frees.
        inexact: gathered or flying units whose values are rounded.
        blocks: (unit, number of `gathered()` blocks that hold it now), where there are any.
        current: the unit that was used last; -1 for none.
        seen: pinned units whose use needs no further record in this pass.
        stays: whether what was gathered stays pinned beyond the backward, for a window.
    """

    model: int
    units: Units
    rounds: bool = False
    gathered: tuple[int, ...] = ()
    flying: tuple[int, ...] = ()
    pinned: frozenset[int] = frozenset()
    inexact: frozenset[int] = frozenset()
    blocks: tuple[tuple[int, int], ...] = ()
    current: int = -1
    seen: frozenset[int] = frozenset()
    stays: bool = False

    def has(self, unit: int) -> bool:
        """Whether a unit is gathered or flying."""
        return unit in self.gathered or unit in self.flying

    def is_current(self, unit: int) -> bool:
        """Whether a unit is gathered, and was used last: to use it again changes nothing."""
        return unit == self.current and unit in self.gathered


Next = tuple[Residency, tuple[Effect, ...]]


def gather(r: Residency, unit: int) -> Next:
    """Start to gather a unit; it is then pinned if what is gathered stays for the backward."""
    if r.units.limits.keeps:
        r = pin(r, [unit])
    return start(r, unit, inexact=r.rounds and unit in r.units.rounds)


def start(r: Residency, unit: int, *, inexact: bool) -> Next:
    """Start to gather a unit, unless it is gathered or in flight."""
    if r.has(unit):
        return r, ()
    rounded = r.inexact | {unit} if inexact else r.inexact
    new = replaced(r, flying=(*r.flying, unit), inexact=rounded)
    return new, (Gather(r.model, unit, exact=not inexact),)


def wait(r: Residency, units: Iterable[int]) -> Next:
    """Wait for the units that are flying."""
    coming = tuple(unit for unit in units if unit in r.flying)
    if not coming:
        return r, ()
    flying = tuple(unit for unit in r.flying if unit not in coming)
    new = replaced(r, gathered=(*r.gathered, *coming), flying=flying)
    return new, tuple(Wait(r.model, unit) for unit in coming)


def free(r: Residency, units: Iterable[int]) -> Next:
    """Free units that are gathered or in flight, except pinned ones."""
    gone = tuple(unit for unit in units if r.has(unit) and unit not in r.pinned)
    if not gone:
        return r, ()
    new = replaced(
        r,
        gathered=tuple(unit for unit in r.gathered if unit not in gone),
        flying=tuple(unit for unit in r.flying if unit not in gone),
        inexact=r.inexact.difference(gone),
    )
    return new, tuple(Free(r.model, unit) for unit in gone)


def release(r: Residency, *, pinned: bool = False) -> Next:
    """Free every unit; those that are pinned only if `pinned`."""
    if pinned:
        r = replaced(r, pinned=frozenset(), seen=frozenset())
    return free(r, (*r.gathered, *r.flying))


def pin(r: Residency, units: Collection[int]) -> Residency:
    """Pin units: no plan frees them."""
    return r if r.pinned.issuperset(units) else replaced(r, pinned=r.pinned.union(units))


def unpin(r: Residency, units: Collection[int]) -> Next:
    """Free units, also if they are pinned."""
    pinned, seen = r.pinned.difference(units), r.seen.difference(units)
    return free(replaced(r, pinned=pinned, seen=seen), units)


def drop_inexact(r: Residency, units: Collection[int]) -> Next:
    """Free units whose gathered values are rounded."""
    rounded = [unit for unit in units if unit in r.inexact]
    return unpin(r, rounded) if rounded else (r, ())


def end_backward(r: Residency) -> Next:
    """Unpin what was pinned for one backward, unless a window keeps it; free what is not pinned."""
    if not r.stays:
        remain = {*r.units.persistent, *(unit for unit, _ in r.blocks)}
        r = replaced(r, pinned=r.pinned & remain, seen=r.seen.intersection(r.units.persistent))
    return release(r)


def open_block(r: Residency, units: Collection[int]) -> Residency:
    """A `gathered()` block holds these units: they are pinned until as many blocks have ended."""
    counts = dict(r.blocks)
    for unit in units:
        counts[unit] = counts.get(unit, 0) + 1
    return replaced(pin(r, units), blocks=tuple(counts.items()))


def close_block(r: Residency, units: Collection[int]) -> Next:
    """A block ends: free those units that no other block holds."""
    counts = dict(r.blocks)
    for unit in units:
        counts[unit] = counts.get(unit, 1) - 1
    r = replaced(r, blocks=tuple((u, n) for u, n in counts.items() if n > 0))
    return unpin(r, [unit for unit in units if counts[unit] <= 0])
