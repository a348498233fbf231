"""What is shown while the run goes: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

LINE_SECONDS = 5.0
_BAR = "step {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


class Progress:
    """Shows, on stderr, the steps that are done, the time left, the loss and tokens per second.

    On a terminal it is a bar of tqdm, if that is installed (the extra `train`). Elsewhere, a log
    file for instance, it is a line for the first and the last step and every 5 s between, which
    has the bytes that this rank holds as well.

    A context: at its end the bar is closed, so that what is printed next has a line of its own.

    Example:
        >>> with Progress(start=0, total=9, tokens_per_step=1) as progress:
        ...     progress.done, progress.total
        (0, 9)
    """

    def __init__(self, *, start: int, total: int, tokens_per_step: int, shown: bool = True) -> None:
        """Begin at step `start` of `total`; nothing is written unless `shown`."""
        self.done, self.start, self.total = start, start, total
        self.tokens_per_step, self.shown = tokens_per_step, shown
        self.began, self.last_line = time.perf_counter(), float("-inf")
        self.bar = _bar(start, total) if shown and start < total else None

    def __enter__(self) -> Progress:
        """Return the progress itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the terminal in order."""
        if self.bar is not None:
            self.bar.close()

    def step(self, loss: float, state_bytes: int) -> None:
        """Count one more step."""
        self.done += 1
        if not self.shown:
            return
        now = time.perf_counter()
        seconds = (now - self.began) / (self.done - self.start)  # of a step
        text = f"loss {loss:.3f}, {self.tokens_per_step / seconds:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif now - self.last_line >= LINE_SECONDS or self.done == self.total:
            self.last_line = now
            left = datetime.timedelta(seconds=round((self.total - self.done) * seconds))
            text += f", {state_bytes / 1e6:,.1f} MB/rank, {left} left"
            print(f"step {self.done}/{self.total}: {text}", file=sys.stderr, flush=True)


def _bar(start: int, total: int) -> Any:
    """Return a bar, where there can be one."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(initial=start, total=total, bar_format=_BAR, dynamic_ncols=True)
