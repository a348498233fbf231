"""What is shown while the run goes: a bar on a terminal, lines elsewhere, nothing if quiet."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from typing import Any, final

LINE_SECONDS = 5.0


class Progress(ABC):
    """Shows each step's loss, the tokens per second so far, and the bytes this rank holds."""

    def __init__(self, *, start: int, total: int, tokens_per_step: int) -> None:
        """Begin at step `start` of `total`."""
        self.done, self.start, self.total = start, start, total
        self.tokens_per_step = tokens_per_step
        self.began = time.perf_counter()

    def step(self, loss: float, state_bytes: int) -> None:
        """One more step is done."""
        self.done += 1
        seconds = time.perf_counter() - self.began
        rate = (self.done - self.start) * self.tokens_per_step / seconds
        self.show(f"loss {loss:.3f}, {rate:,.0f} tokens/s, {state_bytes / 1e6:,.1f} MB/rank")

    @abstractmethod
    def show(self, text: str) -> None:
        """Show `text` for step `done`."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal in order."""


@final
class Bar(Progress):
    """A tqdm bar on stderr."""

    def __init__(self, tqdm: Any, *, start: int, total: int, tokens_per_step: int) -> None:
        """Open the bar; `tqdm` is the class of that name."""
        super().__init__(start=start, total=total, tokens_per_step=tokens_per_step)
        self.bar = tqdm(initial=start, total=total, unit="step", dynamic_ncols=True)

    def show(self, text: str) -> None:
        """Advance the bar."""
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()

    def close(self) -> None:
        """End the bar's line."""
        self.bar.close()


@final
class Lines(Progress):
    """A line on stderr for the first and last step, and every 5 s between."""

    def __init__(self, *, start: int, total: int, tokens_per_step: int) -> None:
        """Show the first step as it comes."""
        super().__init__(start=start, total=total, tokens_per_step=tokens_per_step)
        self.shown = float("-inf")

    def show(self, text: str) -> None:
        """Print, if it is time."""
        now = time.perf_counter()
        if now - self.shown >= LINE_SECONDS or self.done == self.total:
            self.shown = now
            print(f"step {self.done}/{self.total}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the lines as they are."""


@final
class Silent(Progress):
    """Shows nothing: other ranks than 0, and --quiet."""

    def show(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Have nothing to end."""


def make_progress(*, start: int, total: int, tokens_per_step: int, silent: bool) -> Progress:
    """Choose the bar on a terminal with tqdm, else lines, else silence.

    Example:
        >>> make_progress(start=0, total=9, tokens_per_step=1, silent=True).total
        9
    """
    if silent:
        return Silent(start=start, total=total, tokens_per_step=tokens_per_step)
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            return Lines(start=start, total=total, tokens_per_step=tokens_per_step)
        return Bar(tqdm, start=start, total=total, tokens_per_step=tokens_per_step)
    return Lines(start=start, total=total, tokens_per_step=tokens_per_step)
