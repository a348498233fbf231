"""What is shown while the run goes: a line every few seconds."""

from __future__ import annotations

import sys
import time

LINE_SECONDS = 5.0


class Progress:
    """Shows, on stderr, a step's loss, the tokens per second, and the bytes this rank holds.

    It writes a line for the first and the last step, and every 5 s between.

    Example:
        >>> Progress(start=0, total=9, tokens_per_step=1).total
        9
    """

    def __init__(self, *, start: int, total: int, tokens_per_step: int) -> None:
        """Begin at step `start` of `total`."""
        self.done, self.start, self.total = start, start, total
        self.tokens_per_step = tokens_per_step
        self.began, self.shown = time.perf_counter(), float("-inf")

    def step(self, loss: float, state_bytes: int) -> None:
        """One more step is done."""
        self.done += 1
        now = time.perf_counter()
        if now - self.shown >= LINE_SECONDS or self.done == self.total:
            self.shown = now
            rate = (self.done - self.start) * self.tokens_per_step / (now - self.began)
            text = f"loss {loss:.3f}, {rate:,.0f} tokens/s, {state_bytes / 1e6:,.1f} MB/rank"
            print(f"step {self.done}/{self.total}: {text}", file=sys.stderr, flush=True)
