"""Ctrl-C that ends a run between two steps, on all ranks at the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """Inside `with`, SIGINT and SIGTERM are remembered in `received` instead of ending the run.

    A second one changes nothing: a launcher repeats what the terminal sent already. The handlers
    from before come back at the end of `with`.

    Example:
        >>> with StopSignals() as stop:
        ...     signal.raise_signal(signal.SIGINT)
        ...     stop.received == signal.SIGINT
        True
    """

    def __init__(self) -> None:
        """Remember nothing yet; handlers are set by `with` (in the main thread only)."""
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        """Take over both signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give both signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number


def exit_code(received: int, *, launched: bool) -> int:
    """Return 128 + the signal, as shells do; 0 under a launcher.

    A launcher takes any other code of a rank for a crash, and may start it again.

    Example:
        >>> exit_code(signal.SIGINT, launched=False), exit_code(signal.SIGINT, launched=True)
        (130, 0)
    """
    return 0 if launched or not received else 128 + received
