"""Learning-rate schedules: pure functions from updates made so far to a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fzero.errors import LayoutError

Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """lr(t) = lr.

    Example:
        >>> constant(0.1)(7)
        0.1
    """
    return _Schedule(_constant, (lr,))


def linear(start: float, end: float, steps: int) -> Schedule:
    """lr(t) = start + (end - start) min(t / steps, 1).

    Example:
        >>> linear(0.0, 1.0, 4)(1)
        0.25
    """
    _positive("linear", steps)
    return _Schedule(_linear, (start, end, steps))


def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, *, floor: float = 0.0
) -> Schedule:
    """Linear to `peak` over `warmup_steps`, then half a cosine down to `floor`.

    lr(t) = peak (t+1) / warmup for t < warmup, then floor + (peak - floor) (1 + cos(pi s)) / 2
    with s from 0 at the end of the warm-up to 1 at `total_steps`; `floor` after that.

    Example:
        >>> lr = warmup_cosine(1.0, 2, 10)
        >>> [round(lr(t), 3) for t in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _positive("warmup_cosine", total_steps)
    return _Schedule(_warmup_cosine, (peak, warmup_steps, total_steps, floor))


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A rule and its numbers: a closure could not be pickled with a state."""

    rule: Callable[..., float]
    numbers: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.rule(step, *self.numbers)

    def __repr__(self) -> str:
        return f"{self.rule.__name__.strip('_')}{self.numbers}"


def _constant(step: int, lr: float) -> float:
    return lr


def _linear(step: int, start: float, end: float, steps: int) -> float:
    return start + (end - start) * min(step / steps, 1.0)


def _warmup_cosine(step: int, peak: float, warmup: int, total: int, floor: float) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    s = min((step - warmup) / max(total - warmup, 1), 1.0)
    return floor + (peak - floor) * (1 + math.cos(math.pi * s)) / 2


def _positive(name: str, steps: int) -> None:
    if steps < 1:
        raise LayoutError(
            f"schedules.{name}: {steps} steps.",
            cause="a step count of zero or less.",
            fix="give the number of updates, at least 1.",
        )
