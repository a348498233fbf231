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
    return _Constant(lr)


def linear(start: float, end: float, steps: int) -> Schedule:
    """lr(t) = start + (end - start) min(t / steps, 1).

    Example:
        >>> linear(0.0, 1.0, 4)(1)
        0.25
    """
    _positive("linear", steps)
    return _Linear(start, end, steps)


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
    return _WarmupCosine(peak, warmup_steps, total_steps, floor)


# Records and no closures, which could not be pickled with a state.


@dataclass(frozen=True, slots=True)
class _Constant:
    lr: float

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True, slots=True)
class _Linear:
    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True, slots=True)
class _WarmupCosine:
    peak: float
    warmup_steps: int
    total_steps: int
    floor: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        s = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * s)) / 2


def _positive(name: str, steps: int) -> None:
    if steps < 1:
        raise LayoutError(
            f"schedules.{name}: {steps} steps.",
            cause="a step count of zero or less.",
            fix="give the number of updates, at least 1.",
        )
