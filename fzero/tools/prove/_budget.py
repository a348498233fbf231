"""The CPU time that a proof may take."""

from __future__ import annotations

import time

DEFAULT_S = 60.0


class OutOfBudget(Exception):
    """The CPU time is spent."""


class Budget:
    """So many seconds of this thread's CPU time, from now on, for each of so many ranks."""

    def __init__(
        self, seconds: float = DEFAULT_S, ranks: int = 1, within: Budget | None = None
    ) -> None:
        self.seconds = seconds
        until = time.thread_time() + seconds * ranks
        self._until = until if within is None else min(until, within._until)

    def of_one(self) -> Budget:
        """Return a budget for one program, within this one."""
        return Budget(self.seconds, within=self)

    def check(self, what: str = "") -> None:
        """Raise `OutOfBudget` if it is spent, at `what`."""
        if time.thread_time() > self._until:
            raise OutOfBudget(f"the budget of {self.seconds:g} s of CPU time is spent{what}")
