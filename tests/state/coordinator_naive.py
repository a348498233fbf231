"""A naive model of the coordinator: it goes through a log, entry by entry.

The log has what was asked of the coordinator and which effects were run, in order. From that,
with lists and sums and no record of its own, `Naive` says which effects the next event must have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fzero.state.coordinator_effects import Drain, Gather, Prefetch, Release, Wait
from fzero.state.coordinator_record import CoordinatorState, new_coordinator
from fzero.state.units import Limits

Log = Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class World:
    """Sizes of units, needs of modules (no unit twice in one module), and limits."""

    numels: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    limits: Limits

    @cached_property
    def persistent(self) -> set[int]:
        """The units that stay, chosen one after the other."""
        stay: set[int] = set()
        for unit, numel in enumerate(self.numels):
            small = numel <= self.limits.persistence_threshold_numel
            if small and self.sum([*stay, unit]) <= self.limits.model_persistence_threshold_numel:
                stay.add(unit)
        return stay

    def sum(self, ids: Iterable[int]) -> int:
        """Elements of `ids`."""
        return sum(self.numels[unit] for unit in ids)

    def coordinator(self) -> CoordinatorState:
        """The coordinator of this world: units u0, u1, ..., modules m0, m1, ..."""
        numels = {f"u{unit}": numel for unit, numel in enumerate(self.numels)}
        needs = {f"m{m}": [f"u{unit}" for unit in ids] for m, ids in enumerate(self.needs)}
        return new_coordinator(numels, needs, self.limits)


class Naive:
    """What is so after `log`, found by going through all of it."""

    def __init__(self, world: World, log: Log) -> None:
        self.world = world
        self.needs = [list(ids) for ids in world.needs]
        self.active: list[int] = []
        self.held: list[tuple[int, ...]] = []
        self.live: list[int] = []
        self.here: set[int] = set()
        self.early: set[int] = set()  # prefetched, and no module has asked for it yet
        self.recording: list[int] | None = None
        self.order: list[int] | None = None
        self.at = 0
        self.window = False
        self.warnings = 0
        for what, *rest in log:
            getattr(self, f"_{what}")(*rest)

    def after(self, what: str, *rest: Any) -> Naive:
        """Return what is so after one more entry: the same as from the whole log, in less time."""
        new = copy(self)
        vars(new).update(
            {name: x.copy() for name, x in vars(self).items() if isinstance(x, list | set)}
        )
        new.needs = [ids.copy() for ids in self.needs]
        getattr(new, f"_{what}")(*rest)
        return new

    @property
    def used(self) -> set[int]:
        return {u for m in self.active for u in self.needs[m]} | {u for h in self.held for u in h}

    @property
    def idle(self) -> set[int]:
        return set(self.live) - self.used - self.world.persistent

    def moves(self, module: int) -> list[int]:
        return [unit for unit in self.needs[module] if unit not in self.world.persistent]

    def distance(self, unit: int) -> float:
        """Elements that the rest of the order, and in a window the next step, use before `unit`."""
        order, passed = self.order or [], 0
        for module in [*order[self.at :], *(order if self.window else [])]:
            if unit in self.moves(module):
                return passed
            passed += self.world.sum(self.moves(module))
        return math.inf

    def to_prefetch(self, live: Sequence[int]) -> list[int]:
        limits, chosen = self.world.limits, []
        early = self.early & set(live)
        for module in (self.order or [])[self.at :]:
            for unit in self.moves(module):
                if unit in [*live, *chosen]:
                    continue
                more = self.world.sum([*chosen, unit])
                fits_live = self.world.sum(live) + more <= limits.max_live_parameters_numel
                fits_bucket = self.world.sum(early) + more <= limits.prefetch_bucket_numel
                if not (fits_live and fits_bucket):
                    return chosen
                chosen.append(unit)
        return chosen

    def evicted(self, live: Iterable[int], idle: Iterable[int]) -> list[int]:
        """The farthest idle units, until what is left fits."""
        left, gone = set(live), []
        for unit in sorted(idle, key=lambda u: (-self.distance(u), -u)):
            if self.world.sum(left) <= self.world.limits.max_live_parameters_numel:
                break
            left.remove(unit)
            gone.append(unit)
        return gone

    def between_steps(self, live: Iterable[int]) -> list[int]:
        """What must go between two steps of which the last left `live`."""
        reach = self.world.limits.max_reuse_distance_numel
        far = {unit for unit in self.idle if not self.window or self.distance(unit) >= reach}
        return [*far, *self.evicted(set(live) - far, self.idle - far)]

    # What each entry of the log means.

    def _begin_step(self) -> None:
        if self.order is not None:
            self.at = 0
        elif self.recording is None:
            self.recording = []
        elif self.recording:
            self.order = [m for m in self.recording if self.moves(m)]
            self.recording, self.at = None, 0

    def _fetch(self, module: int) -> None:
        self.active.append(module)
        self.early -= set(self.needs[module])
        if self.recording is not None:
            self.recording.append(module)
        if self.order is not None and self.moves(module):
            if self.at == len(self.order):  # the step goes on: its longer order is recorded
                self.recording, self.order = [*self.order, module], None
            elif self.order[self.at] == module:
                self.at += 1
            else:
                self._forget()

    def _forget(self) -> None:
        self.order = None
        self.warnings += 1

    def _release(self, module: int) -> None:
        self.active.remove(module)

    def _register_external(self, module: int, ids: tuple[int, ...]) -> None:
        new = [unit for unit in dict.fromkeys(ids) if unit not in self.needs[module]]
        self.needs[module] += new
        if module in self.active:
            self.early -= set(new)
        if self.order is not None and set(new) - self.world.persistent:
            self._forget()

    def _hold(self, ids: tuple[int, ...]) -> None:
        self.held.append(ids)
        self.early -= set(ids)

    def _let_go(self, ids: tuple[int, ...]) -> None:
        self.held.remove(ids)

    def _end_step(self) -> None:
        self.active = []

    def _begin_window(self) -> None:
        self.window = True

    def _end_window(self) -> None:
        self.window = False

    def _abort(self) -> None:
        self.active, self.recording = [], None

    def _updated(self, ids: tuple[int, ...]) -> None:
        """The effects say what became of it."""

    def _gathered(self, ids: tuple[int, ...]) -> None:
        self.here |= set(ids)

    def _Gather(self, ids: tuple[int, ...]) -> None:
        self.live += ids

    def _Prefetch(self, ids: tuple[int, ...]) -> None:
        self.live += ids
        self.early |= set(ids)

    def _Release(self, ids: tuple[int, ...]) -> None:
        for unit in ids:
            self.live.remove(unit)
            self.here.discard(unit)
            self.early.discard(unit)

    _Drain = _Release

    # What must come back for the next event.

    def refuses(self, event: str, *args: Any) -> bool:
        """Whether the event is illegal now."""
        flying = set(self.live) - self.here
        whole = {m for m, needs in enumerate(self.needs) if set(needs) <= self.here}
        return {
            "begin_step": lambda: bool(self.active),
            "release": lambda m: m not in self.active or m not in whole,
            "require_ready": lambda m: m not in self.active or m not in whole,
            "gathered": lambda ids: len(set(ids)) < len(ids) or not set(ids) <= flying,
            "let_go": lambda ids: ids not in self.held,
            "updated": lambda ids: bool(set(ids) & self.used),
        }.get(event, lambda *_: False)(*args)

    def effects(self, after: Naive, event: str, *args: Any) -> list[Any]:
        """The effects that `event` must have, which leads to `after`; ids to free are sorted."""
        warned = ["warn"] * (after.warnings - self.warnings)
        if event == "begin_step":
            completed = after.order is not None and self.order is None
            agreed = ["agree"] * completed
            asked = [u for u in sorted(self.world.persistent) if u not in self.live]
            freed = self._free(after.between_steps([*self.live, *asked]))
            return [*freed, *agreed, *_some(Gather, asked)]
        if event in ("fetch", "hold", "register_external"):
            return [*warned, *self._asked(after, event, *args)]
        if event == "release":
            reach = self.world.limits.max_reuse_distance_numel
            idle = set(after.moves(*args)) & after.idle
            gone = {unit for unit in idle if after.distance(unit) >= reach}
            late = after.evicted(set(after.live) - gone, after.idle - gone)
            return self._free([*gone, *late])
        if event == "end_step":
            return self._free(after.between_steps(self.live))
        if event == "end_window":
            return self._free(after.idle)
        if event == "abort":
            return self._free(set(self.live) - (self.here & after.used))
        if event in ("let_go", "updated"):
            keep = after.used | self.world.persistent if event == "let_go" else set()
            return self._free({unit for unit in args[0] if unit in self.live} - keep)
        return []

    def _wanted(self, after: Naive, event: str, *args: Any) -> list[int]:
        """The units that the event needs to be whole."""
        if event == "fetch":
            return after.needs[args[0]]
        if event == "hold":
            return list(dict.fromkeys(args[0]))
        module, ids = args
        new = [unit for unit in dict.fromkeys(ids) if unit not in self.needs[module]]
        return new if module in after.active else []

    def _asked(self, after: Naive, event: str, *args: Any) -> list[Any]:
        wanted = self._wanted(after, event, *args)
        missing = [unit for unit in wanted if unit not in self.live]
        live = [*self.live, *missing]
        gone = after.evicted(live, set(live) - after.used - self.world.persistent)
        kept = [unit for unit in live if unit not in gone]
        ahead = after.to_prefetch(kept) if event == "fetch" else []
        late = [unit for unit in wanted if unit not in self.here]
        freed = self._free(gone)
        return [*freed, *_some(Gather, missing), *_some(Wait, late), *_some(Prefetch, ahead)]

    def _free(self, ids: Iterable[int]) -> list[Any]:
        gone = set(ids)
        flying = sorted(gone - self.here)
        return [*_some(Drain, flying), *_some(Release, sorted(gone & self.here))]


def _some(effect: Any, ids: Iterable[int]) -> list[Any]:
    return [effect(tuple(ids))] if tuple(ids) else []
