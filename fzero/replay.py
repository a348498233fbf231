"""A program as it runs: recorded, or replayed in the same order on every rank, without asking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fzero.gather import Gatherer
from fzero.reduce import Reducer
from fzero.state.schedule import Events, Plan, Program, union

Done = tuple[int, int, Program]
"""(pass, phase, what it did)"""


class Recording:
    """What this rank does in each phase of a pass: uses of units, reductions (~unit), sync points.

    number: of the model on its channel. sync_point: the event of a collective of the user's.
    """

    def __init__(self, number: int, sync_point: int) -> None:
        self._number, self._sync_point = number, sync_point
        self._phases: dict[tuple[int, int], list[int]] = {}
        self._events: list[int] = []

    def begin(self, index: int, phase: int) -> None:
        """What comes now belongs to this phase (0 forward, 1 backward) of pass `index`."""
        self._events = self._phases[index, phase] = []

    def pause(self) -> None:
        """What comes now belongs to no pass."""
        self._events = []

    def add(self, *events: int) -> None:
        """Note what happened."""
        self._events += events

    def taken(self) -> dict[tuple[int, int, int], Events]:
        """Return, and forget, {(model, pass, phase): events}."""
        phases, self._phases, self._events = self._phases, {}, []
        return {(self._number, *key): tuple(events) for key, events in phases.items()}

    def joined(self, told: Sequence[Any]) -> list[Done]:
        """Return what all ranks did with this model, of what they told (None: in no pass)."""
        known = [one for one in told if one is not None]
        keys = sorted({key for one in known for key in one if key[0] == self._number})
        done = {key[1:]: [one[key] for one in known if key in one] for key in keys}
        return [(*key, union(programs, self._sync_point)) for key, programs in done.items()]


class Replay:
    """Walks one plan, step by step.

    A rank that does not use a unit takes part in its gather and drops it; one that has no gradient
    of a unit reduces zeros (a sum is linear: what comes later is reduced later).

    keeps: what is gathered stays. sync_point: the event of a collective of the user's, where the
    walk stops until all ranks have come (`at_sync_point`).
    """

    def __init__(
        self, plan: Plan, gatherer: Gatherer, reducer: Reducer, *, keeps: bool, sync_point: int
    ) -> None:
        self._plan, self._gatherer, self._reducer = plan, gatherer, reducer
        self._keeps, self._sync_point = keeps, sync_point
        self._at = self._started = 0  # the step, and how many of its reductions have started
        self._ready: set[int] = set()
        self.at_sync_point = False
        self.gathered_here: list[int] = []  # at this sync point, beside the plan

    def use(self, unit: int, *, held: bool) -> bool:
        """Go to the next use of a unit before the next sync point; False if the plan has none."""
        place, sync_point = self._plan.next_use(unit, self._at), self._next_sync_point()
        if place is None or (sync_point is not None and place > sync_point):
            return False
        if place == self._at + 1 or not held:
            self._go_to(place)
        return True

    def complete(self, units: Iterable[int]) -> None:
        """The gradients of these units are complete on this rank."""
        self._ready.update(units)

    def start_ready(self) -> None:
        """Start the reductions of this step that are ready, in its order."""
        reduces = self._plan.steps[self._at].reduces
        while not self.at_sync_point and self._started < len(reduces):
            if reduces[self._started] not in self._ready:
                return
            self._start_next()

    def run(self) -> bool:
        """Go to the next sync point, or to the end; return whether it is the end."""
        if self.at_sync_point:
            return False
        sync_point = self._next_sync_point()
        if sync_point is None:
            self._go_to(len(self._plan.steps) - 1)
            self._end_step()
            return True
        self._go_to(sync_point)
        return False

    def leave_sync_point(self) -> None:
        """All ranks have come to the sync point: what was gathered there for one of them goes."""
        self.at_sync_point = False
        for unit in self.gathered_here:
            self._gatherer.free(unit)
        self.gathered_here = []
        self.start_ready()

    def _next_sync_point(self) -> int | None:
        return self._plan.next_use(self._sync_point, self._at)

    def _go_to(self, place: int) -> None:
        while self._at < place:
            step = self._plan.steps[self._at + 1]
            for unit in step.frees:  # first of all: the gradients of this step take room
                self._gatherer.free(unit)
            self._end_step()
            self._at, self._started = self._at + 1, 0
            for unit in (*step.gathers, *step.ahead):
                self._gatherer.start(unit)
            if self._keeps:
                self._gatherer.kept.update(step.gathers, step.ahead)
            self.at_sync_point = step.unit == self._sync_point
            self.start_ready()

    def _end_step(self) -> None:
        """Start the other reductions of this step, ready or not."""
        while self._started < len(self._plan.steps[self._at].reduces):
            self._start_next()

    def _start_next(self) -> None:
        unit = self._plan.steps[self._at].reduces[self._started]
        self._started += 1
        self._ready.discard(unit)
        self._reducer.start(unit)
