"""What a rank does in a pass, noted as it happens: the schedule of the passes that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.state.schedule import Events, Program, union

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

    def add_sync_point(self) -> None:
        """Note a collective of the user's, as the use of a unit that is always whole."""
        self.add(self._sync_point)

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
