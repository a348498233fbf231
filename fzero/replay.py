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
    """What this rank does in each phase of a pass: uses of units, reductions (~unit), meetings.

    number: of the model on its channel. meeting: what stands for a collective of the user's.
    """

    def __init__(self, number: int, meeting: int) -> None:
        self._number, self._meeting = number, meeting
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
        return [(*key, union(programs, self._meeting)) for key, programs in done.items()]


class Replay:
    """Walks one plan, step by step.

    A rank that does not use a unit takes part in its gather and drops it; one that has no gradient
    of a unit reduces zeros (a sum is linear: what comes later is reduced later).

    keeps: what is gathered stays. meeting: what stands in the plan for a collective of the user's,
    where the walk stops until all ranks have come (`stands`).
    """

    def __init__(
        self, plan: Plan, gatherer: Gatherer, reducer: Reducer, *, keeps: bool, meeting: int
    ) -> None:
        self._plan, self._gatherer, self._reducer = plan, gatherer, reducer
        self._keeps, self._meeting = keeps, meeting
        self._at = self._started = 0  # the step, and how many of its reductions have started
        self._ready: set[int] = set()
        self.stands = False
        self.asked_here: list[int] = []  # gathered where it stands, beside the plan

    def use(self, unit: int, *, held: bool) -> bool:
        """Go to the next use of a unit before the next meeting; False if the plan has none."""
        place, meeting = self._plan.next_use(unit, self._at), self._next_meeting()
        if place is None or (meeting is not None and place > meeting):
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
        while not self.stands and self._started < len(reduces):
            if reduces[self._started] not in self._ready:
                return
            self._start_next()

    def run(self) -> bool:
        """Go to the next meeting, or to the end; return whether it is the end."""
        if self.stands:
            return False
        meeting = self._next_meeting()
        if meeting is None:
            self._go_to(len(self._plan.steps) - 1)
            self._end_step()
            return True
        self._go_to(meeting)
        return False

    def go_on(self) -> None:
        """All ranks have come to the meeting: what was gathered there for one of them goes."""
        self.stands = False
        for unit in self.asked_here:
            self._gatherer.free(unit)
        self.asked_here = []
        self.start_ready()

    def _next_meeting(self) -> int | None:
        return self._plan.next_use(self._meeting, self._at)

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
            self.stands = step.unit == self._meeting
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
