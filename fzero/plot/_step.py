"""The time of a step in two lanes, compute and collectives: data, table, picture, trace file."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from fzero.errors import LayoutError, explain
from fzero.plot import _html, _lanes
from fzero.plot._units import in_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lane = Literal["compute", "collectives"]
LANES: tuple[Lane, ...] = ("compute", "collectives")
HEADER = ("start", "duration", "lane", "phase", "event", "about")


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
        """When it is over."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepTimeline:
    """The events of one step on one rank, planned or measured. Plain data.

    total_s: how long the step takes, what the events leave free included.
    """

    title: str
    events: tuple[StepEvent, ...]
    total_s: float

    @property
    def compute_s(self) -> float:
        """Seconds in which something is computed."""
        return _length(_busy(self._of("compute")))

    @property
    def communication_s(self) -> float:
        """Seconds in which a collective is under way."""
        return _length(_busy(self._of("collectives")))

    @property
    def exposed_s(self) -> float:
        """Exposed communication: seconds in which a collective is, and nothing is computed."""
        return _length(_busy(self.events)) - self.compute_s

    def to_dict(self) -> dict[str, Any]:
        """Return it as dicts, lists, strings and numbers: what JSON can hold."""
        events = [asdict(event) for event in self.events]
        return {"title": self.title, "total_s": self.total_s, "events": events}

    def summary(self) -> str:
        """Return the four durations in one line."""
        return (
            f"step {in_seconds(self.total_s)}; compute {in_seconds(self.compute_s)}, "
            f"collectives {in_seconds(self.communication_s)}, "
            f"of them exposed {in_seconds(self.exposed_s)}"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row of strings for each event, in the order in which they start."""
        return [
            (
                in_seconds(event.start_s),
                in_seconds(event.duration_s),
                event.lane,
                event.phase,
                event.name,
                event.detail,
            )
            for event in sorted(self.events, key=lambda event: event.start_s)
        ]

    def table(self) -> str:
        """Return the timeline as text, a line for each event."""
        return f"{self.title}\n{self.summary()}\n{_html.text_table(HEADER, self.rows())}"

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw it on `ax` (default: a new figure) and return the axes: a lane of each kind.

        Each bar has its name in it, or beside it; names of bars that are too narrow to have one
        each are one, "12 ops", with a line over those bars.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        return _lanes.draw(self, ax)

    def to_perfetto(self, path: str | PathLike[str], *others: StepTimeline) -> None:
        """Write it, and `others` below it, as JSON that ui.perfetto.dev and chrome://tracing open.

        Each timeline is a process, each lane a thread of it; times are in microseconds.

        Source: Google, "Trace Event Format", complete events (ph = X).

        Example:
            >>> import json, pathlib, tempfile
            >>> event = StepEvent(lane="compute", name="mm", start_s=0.0, duration_s=2e-6)
            >>> timeline = StepTimeline(title="a step", events=(event,), total_s=2e-6)
            >>> path = pathlib.Path(tempfile.mkdtemp(), "step.json")
            >>> timeline.to_perfetto(path)
            >>> [e["dur"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
            [2.0]
        """
        events = [
            entry
            for process, timeline in enumerate((self, *others), 1)
            for entry in _entries(timeline, process)
        ]
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def _of(self, lane: Lane) -> list[StepEvent]:
        return [event for event in self.events if event.lane == lane]

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        rows = [[html.escape(cell) for cell in row] for row in self.rows()]
        head = f"<b>{html.escape(self.title)}</b><br>{html.escape(self.summary())}"
        return head + _html.html_table(HEADER, rows)


def draw_timelines(timelines: Sequence[StepTimeline]) -> Figure:
    """Return a figure of timelines below each other, such as a planned and a measured one.

    They have one time axis. Where the longest step takes more than 8 times as long as the shortest
    one, in which little could be seen then, each has an axis of its own, and its title says so.

    Raises `LayoutError` for no timeline, `MissingExtraError` (an `ImportError`) where matplotlib is
    not installed.

    Example:
        >>> event = StepEvent(lane="compute", name="mm", start_s=0.0, duration_s=1.0)
        >>> timeline = StepTimeline(title="a step", events=(event,), total_s=1.0)
        >>> len(draw_timelines([timeline, timeline]).axes)
        2
    """
    if not timelines:
        raise LayoutError(
            explain(
                "draw_timelines: no timelines.",
                cause="an empty list.",
                fix="give at least one: draw_timelines([step_timeline(trace, ...), measured]).",
            )
        )
    return _lanes.stacked(timelines)


def _busy(events: Iterable[StepEvent]) -> list[tuple[float, float]]:
    """Return the times (start, end) at which there is an event, apart from each other."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((event.start_s, event.end_s) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _entries(timeline: StepTimeline, process: int) -> list[dict[str, Any]]:
    """Return the entries of one process of a trace file."""
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.title}}
    ]
    for thread, lane in enumerate(LANES, 1):
        place = {"pid": process, "tid": thread}
        found.append({"ph": "M", "name": "thread_name", **place, "args": {"name": lane}})
        found += [
            {
                "ph": "X",
                "name": event.name,
                "cat": lane,
                "ts": event.start_s * 1e6,
                "dur": event.duration_s * 1e6,
                **place,
                "args": {"phase": event.phase, "about": event.detail},
            }
            for event in timeline._of(lane)
        ]
    return found
