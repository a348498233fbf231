"""The timeline of a step in two lanes, compute and collectives: data, table, picture, file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from fzero.errors import LayoutError
from fzero.tools._units import in_seconds
from fzero.tools.plot import _figure
from fzero.tools.plot._html import Table
from fzero.tools.plot._lanes import (
    LANES,
    Lane,
    StepEvent,
    axis_and_parameters,
)
from fzero.tools.plot._palette import ABSENT, BASE, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_INCHES, HIGH_INCHES = 10.0, 2.4  # of a timeline with title, ticks and legend
BAR = 0.7  # the height of a bar, in lanes
FONT_POINTS = 7.0
PHASES = {"forward": BASE[0], "backward": BASE[1], "update": BASE[2], "": "#9E9E9E"}
UNKNOWN = "phase not known"
COLLECTIVE = BASE[6]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepTimeline(Table):
    """The events of one step on one rank. Plain data.

    total_s: the duration of the step, with idle time.
    """

    title: str
    events: tuple[StepEvent, ...]
    total_s: float

    @property
    def compute_s(self) -> float:
        """Seconds in which something is computed."""
        return _busy_s(self._of("compute"))

    @property
    def communication_s(self) -> float:
        """Seconds in which a collective is under way."""
        return _busy_s(self._of("collectives"))

    @property
    def exposed_s(self) -> float:
        """Exposed communication: seconds in which a collective is, and nothing is computed."""
        return _busy_s(self.events) - self.compute_s

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

    def _heading(self) -> list[str]:
        return [self.title, self.summary()]

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each event, in the order in which they start."""
        return ("start", "duration", "lane", "phase", "event", "about"), [
            (
                in_seconds(e.start_s),
                in_seconds(e.duration_s),
                e.lane,
                e.phase,
                e.name,
                axis_and_parameters(e.detail),
            )
            for e in sorted(self.events, key=lambda event: event.start_s)
        ]

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw it on `ax` (default: a new figure) and return the axes: a lane of each kind.

        A bar has its name in it where that fits; the table and `to_perfetto` have all names.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        if ax is None:
            return draw_timelines([self]).axes[0]
        figure = ax.get_figure(root=True)
        assert figure is not None
        _draw(figure, [ax], [self])
        return ax

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


def draw_timelines(timelines: Sequence[StepTimeline]) -> Figure:
    """Return a figure of timelines below each other, such as those of two stages.

    They have one time axis: a bar that is twice as long takes twice as long. A step that is much
    shorter than the longest one is small; `timeline.draw()` shows it alone.

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
            "draw_timelines: no timelines.",
            cause="an empty list.",
            fix="give at least one: draw_timelines([measured]).",
        )
    figure = _figure.new_figure((WIDE_INCHES, HIGH_INCHES * len(timelines)))
    every = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    _draw(figure, list(every), timelines)
    return figure


def _busy_s(events: Iterable[StepEvent]) -> float:
    """Return the seconds that the union of the events covers."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((event.start_s, event.end_s) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return sum(end - start for start, end in found)


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


# The picture. A lane is at y = 0, 1, from above.


def _draw(figure: Figure, every: Sequence[Axes], timelines: Sequence[StepTimeline]) -> None:
    longest = max(one.total_s for one in timelines)
    for timeline, ax in zip(timelines, every, strict=True):
        _frame(ax, timeline, longest)
    figure.draw_without_rendering()  # from here on the axes have their size
    for timeline, ax in zip(timelines, every, strict=True):
        for lane in LANES:
            _draw_lane(ax, timeline, lane)


def _frame(ax: Axes, timeline: StepTimeline, span: float) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(0, span or 1.0)
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.tick_params(axis="x", labelsize="small")
    ax.set_yticks(range(len(LANES)), LANES)
    ax.set_ylim(len(LANES) - 0.5, -0.5)
    ax.xaxis.set_major_formatter(lambda seconds, _: in_seconds(seconds))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8))
    title = f"{timeline.title}\n{timeline.summary()}"
    ax.set_title(_figure.verbatim(title), loc="left", fontsize="small")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    _key(ax, timeline)


def _draw_lane(ax: Axes, timeline: StepTimeline, lane: Lane) -> None:
    """Draw the bars of a lane: narrow ones last, above the edges of their neighbours."""
    y, points_per_s = LANES.index(lane), _figure.points_wide(ax) / ax.get_xlim()[1]
    ax.barh(y, timeline.total_s, height=BAR, color=ABSENT, zorder=0.5)
    for narrow in (False, True):
        some = [
            event
            for event in timeline._of(lane)
            if (event.duration_s * points_per_s < _figure.WIDE_POINTS) == narrow
        ]
        some.sort(key=lambda event: event.duration_s)  # of several at one place the longest shows
        fills = list(map(_fill, some))
        places = [(event.start_s, event.duration_s) for event in some]
        edges, width = (fills, 0.6) if narrow else ("white", 0.3)
        look: dict[str, Any] = {"facecolors": fills, "edgecolors": edges, "linewidth": width}
        ax.broken_barh(places, (y - BAR / 2, BAR), **look)
        for event, fill in () if narrow else zip(some, fills, strict=True):
            room = event.duration_s * points_per_s
            if name := _figure.fitting(event.names(), FONT_POINTS, room):
                middle = event.start_s + event.duration_s / 2
                look = {"ha": "center", "va": "center_baseline", "fontsize": FONT_POINTS}
                ax.text(middle, y, _figure.verbatim(name), color=ink(fill), **look)


def _fill(event: StepEvent) -> str:
    return COLLECTIVE if event.lane == "collectives" else PHASES[event.phase]


def _key(ax: Axes, timeline: StepTimeline) -> None:
    from matplotlib.patches import Patch

    seen = {event.phase for event in timeline.events if event.lane == "compute"}
    handles = [
        Patch(color=PHASES[phase], label=phase or UNKNOWN) for phase in PHASES if phase in seen
    ]
    if timeline._of("collectives"):
        handles.append(Patch(color=COLLECTIVE, label="collective"))
    if handles:
        _figure.legend_below(ax, handles)
