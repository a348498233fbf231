"""Ctrl-C that ends a run between two steps, on all ranks at the same step."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# Bounded: 600 looks at the launcher, 0.1 s apart. Then its caller (make, a shell) has its
# word, and a line of its own below a prompt.
_WHEN_IT_HAS_ENDED = """
launcher=$1; shift
n=0
while [ $n -lt 600 ] && kill -0 "$launcher" 2>/dev/null; do sleep 0.1; n=$((n + 1)); done
sleep 0.3
printf '%s\\n' "" "$@"
"""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """In the block, SIGINT and SIGTERM are put into the list that it gives; they do not end it.

    A second one changes nothing: a launcher repeats what the terminal sent already. The handlers
    from before come back at the end. In the main thread only.

    Example:
        >>> with stop_signals() as received:
        ...     signal.raise_signal(signal.SIGINT)
        ...     received == [signal.SIGINT]
        True
    """
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(received: int, *, launched: bool) -> int:
    """Return 128 + the signal, as shells do; 0 under a launcher.

    A launcher takes any other code of a rank for a crash, and may start it again.

    Example:
        >>> exit_code(signal.SIGINT, launched=False), exit_code(signal.SIGINT, launched=True)
        (130, 0)
    """
    return 0 if launched or not received else 128 + received


def say_last(*lines: str, launcher: int) -> None:
    """Print lines when the process `launcher` has ended: below all that it prints of its own end.

    torchrun shows a signal as 30 lines of traceback, after the ranks have ended. So a small process
    prints, which outlives both.
    """
    command = ["sh", "-c", _WHEN_IT_HAS_ENDED, "sh", str(launcher), *lines]
    subprocess.Popen(command, start_new_session=True)
