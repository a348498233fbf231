"""What is shown while the run goes: a bar on a terminal, lines elsewhere, nothing if silent."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 5.0


class Progress:
    """Shows, on stderr, each step's loss, the tokens per second, and the bytes this rank holds.

    By a bar of tqdm if that is installed and stderr is a terminal. Else by a line for the first
    and the last step, and every 5 s between.

    Example:
        >>> Progress(start=0, total=9, tokens_per_step=1, silent=True).total
        9
    """

    def __init__(self, *, start: int, total: int, tokens_per_step: int, silent: bool) -> None:
        """Begin at step `start` of `total`; `silent` shows nothing."""
        self.done, self.start, self.total = start, start, total
        self.tokens_per_step, self.silent = tokens_per_step, silent
        self.bar = None if silent else _bar(start, total)
        self.began, self.shown = time.perf_counter(), float("-inf")

    def step(self, loss: float, state_bytes: int) -> None:
        """One more step is done."""
        self.done += 1
        now = time.perf_counter()
        rate = (self.done - self.start) * self.tokens_per_step / (now - self.began)
        text = f"loss {loss:.3f}, {rate:,.0f} tokens/s, {state_bytes / 1e6:,.1f} MB/rank"
        due = now - self.shown >= LINE_SECONDS or self.done == self.total
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif due and not self.silent:
            self.shown = now
            print(f"step {self.done}/{self.total}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self.bar is not None:
            self.bar.close()


def _bar(start: int, total: int) -> Any:
    """Return a bar, where there can be one."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(initial=start, total=total, unit="step", dynamic_ncols=True)
