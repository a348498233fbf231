"""Events of a step, in two lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "collectives"]
LANES: tuple[Lane, ...] = ("compute", "collectives")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A kernel or a collective: when it starts, from the beginning of the step, and how long it is.

    phase: forward, backward or update; "" where that is not known. detail: of a collective, the
    axis and the parameters that it is about.
    """

    lane: Lane
    name: str
    start_s: float
    duration_s: float
    phase: str = ""
    detail: str = ""

    @property
    def end_s(self) -> float:
        """The end of the event."""
        return self.start_s + self.duration_s

    def names(self) -> list[str]:
        """Return the possible names in a picture: with its first parameter, and without."""
        about = axis_and_parameters(self.detail, 1).partition(": ")[2]
        return [f"{self.name} {about}", self.name] if about else [self.name]


def axis_and_parameters(detail: str, most: int = 2, after: int = 0) -> str:
    """Return the axis of a collective, and at most so many of the parameters that it is about.

    after: how many of the first ones are left out.

    Example:
        >>> all_of_them = "dp: a, b, c, d"
        >>> axis_and_parameters(all_of_them), axis_and_parameters(all_of_them, after=3)
        ('dp: a, b +2', 'dp: ... d')
    """
    axis, colon, paths = detail.partition(": ")
    if not colon:
        return detail
    names = paths.split(", ")[after:]
    rest = f" +{len(names) - most}" if len(names) > most else ""
    return f"{axis}: {'... ' if after else ''}{', '.join(names[:most])}{rest}"
