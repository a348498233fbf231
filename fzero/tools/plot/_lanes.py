"""Events of a step, and the placement of their names in or beside their bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fzero.tools.plot import _figure

Lane = Literal["compute", "collectives"]
LANES: tuple[Lane, ...] = ("compute", "collectives")
FONT_POINTS = 7.0
UPRIGHT_POINTS = 10.0  # from one upright name to the next one


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


@dataclass(slots=True)
class NamedEvents:
    """Neighbouring events that share one name; mostly a single event."""

    events: list[StepEvent]

    def take(self, later: NamedEvents) -> None:
        """Append the events of `later`."""
        self.events += later.events

    @property
    def start(self) -> float:
        return self.events[0].start_s

    @property
    def end(self) -> float:
        return max(event.end_s for event in self.events)

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2

    def names(self) -> list[str]:
        """The possible names, the longest first."""
        first, count = self.events[0], len(self.events)
        if count == 1:
            return list(dict.fromkeys([_about(first), first.name]))
        if all(event.name == first.name for event in self.events):
            return [f"{count} x {first.name}"]
        longest = max(self.events, key=lambda event: event.duration_s)
        if 2 * longest.duration_s > sum(event.duration_s for event in self.events):
            return [f"{longest.name}, {count - 1} more"]
        return [f"{count} ops" if first.lane == "compute" else f"{count} collectives"]


def named(events: Sequence[StepEvent], points_per_s: float) -> list[tuple[NamedEvents, str]]:
    """Return the names of a lane, each with the text that fits into its bar; "" for one beside it.

    Names beside bars are upright. Where two of them would be nearer to each other than a line of
    text is high, and where events are at the same time, bars have one name. No bar has none.
    """
    found: list[NamedEvents] = []
    for event in sorted(events, key=lambda event: event.start_s):
        found.append(NamedEvents([event]))
        while len(found) > 1 and _too_near(found[-2], found[-1], points_per_s):
            last = found.pop()
            found[-1].take(last)
    return [(some, _inside(some, points_per_s)) for some in found]


def _too_near(a: NamedEvents, b: NamedEvents, points_per_s: float) -> bool:
    if (a.end - b.start) * points_per_s > 1.0:  # at the same time
        return True
    if _inside(a, points_per_s) or _inside(b, points_per_s):
        return False
    return (b.middle - a.middle) * points_per_s < UPRIGHT_POINTS


def _inside(some: NamedEvents, points_per_s: float) -> str:
    """Return the longest name that fits into the bar of one event; "" for several events."""
    if len(some.events) > 1:
        return ""
    room = (some.end - some.start) * points_per_s
    return _figure.fitting(some.names(), FONT_POINTS, room)


def _about(event: StepEvent) -> str:
    """Return the name of an event with its first parameter."""
    words = axis_and_parameters(event.detail, 1).partition(": ")[2]
    return f"{event.name} {words}" if words else event.name


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
