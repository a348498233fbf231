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
    FONT_POINTS,
    LANES,
    Lane,
    NamedEvents,
    StepEvent,
    axis_and_parameters,
    named,
)
from fzero.tools.plot._palette import ABSENT, BASE, EDGE, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 130.0  # of the length of an upright name
WIDE_INCHES, HIGH_INCHES = 10.0, 2.4  # of a timeline with title, ticks and legend, without names
BAR, GAP = 22.0, 14.0  # the height of a lane and what is between lanes, in points
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

        Each bar has its name in it, or beside it; names of bars that are too narrow to have one
        each are one, "12 ops", with a line over those bars.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        if ax is None:
            return draw_timelines([self]).axes[0]
        _frame(ax, self, self.total_s)
        figure = ax.get_figure(root=True)
        assert figure is not None
        figure.draw_without_rendering()
        _draw_lanes(ax, self)
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
    longest = max(one.total_s for one in timelines)
    figure = _figure.new_figure((WIDE_INCHES, HIGH_INCHES * len(timelines)))
    every = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    for timeline, ax in zip(timelines, every, strict=True):
        _frame(ax, timeline, longest)
    figure.draw_without_rendering()  # from here on the axes have their size
    pairs = zip(every, timelines, strict=True)
    missing = max(_points_wanted(ax, timeline) - _points_high(ax) for ax, timeline in pairs)
    figure.set_figheight((HIGH_INCHES + max(missing, 0.0) / 72) * len(timelines))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for timeline, ax in zip(timelines, every, strict=True):
        _draw_lanes(ax, timeline)
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


# The picture.


def _points_high(ax: Axes) -> float:
    return ax.get_window_extent().height * 72 / ax.figure.dpi


def _points_wanted(ax: Axes, timeline: StepTimeline) -> float:
    """Return the height of the axes, in points, that vertical names need."""
    return 2 * BAR + GAP + sum(_beside(names) for names in _names(ax, timeline))


def _names(ax: Axes, timeline: StepTimeline) -> list[list[tuple[NamedEvents, str]]]:
    """Return the names of each lane."""
    points_per_s = _figure.points_wide(ax) / ax.get_xlim()[1]
    return [named(timeline._of(lane), points_per_s) for lane in LANES]


def _beside(names: Sequence[tuple[NamedEvents, str]]) -> float:
    """Return the height of the names beside the bars of a lane, in points, with margins."""
    texts = (some.names()[0] for some, inside in names if not inside)
    points = (_figure.text_points(text, FONT_POINTS) for text in texts)
    return 16.0 + min(max(points, default=0.0), MOST_POINTS)


def _frame(ax: Axes, timeline: StepTimeline, span: float) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(0, span or 1.0)
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.tick_params(axis="x", labelsize="small")
    ax.set_yticks([0.7, 0.3], LANES)  # the room that they need, before their place is known
    ax.xaxis.set_major_formatter(lambda seconds, _: in_seconds(seconds))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8))
    title = f"{timeline.title}\n{timeline.summary()}"
    ax.set_title(_figure.verbatim(title), loc="left", fontsize="small")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    _key(ax, timeline)


def _draw_lanes(ax: Axes, timeline: StepTimeline) -> None:
    """Draw bars and names. A unit of y is a point; the names above and below share what is left."""
    high, names = _points_high(ax), _names(ax, timeline)
    ax.set_ylim(0, high)
    wanted = list(map(_beside, names))
    share = (high - 2 * BAR - GAP) / sum(wanted)
    below = wanted[1] * share + BAR / 2
    middles = (below + BAR + GAP, below)
    for i, (y, side) in enumerate(zip(middles, (1, -1), strict=True)):
        events = timeline._of(LANES[i])
        ax.barh(y, timeline.total_s, height=BAR, color=ABSENT, zorder=0.5)
        _draw_bars(ax, events, y)
        for some, inside in names[i]:
            _name(ax, some, inside, y, side, wanted[i] * min(share, 1.0) - 12)
    ax.set_yticks(middles, LANES)


def _draw_bars(ax: Axes, events: Sequence[StepEvent], y: float) -> None:
    """Draw the bars of a lane: narrow ones last, above the edges of their neighbours."""
    seconds = _figure.WIDE_POINTS / _figure.points_wide(ax) * ax.get_xlim()[1]
    for narrow in (False, True):
        some = [event for event in events if (event.duration_s < seconds) == narrow]
        some.sort(key=lambda event: event.duration_s)  # of several at one place the longest shows
        fills = list(map(_fill, some))
        places = [(event.start_s, event.duration_s) for event in some]
        edges, width = (fills, 0.6) if narrow else ("white", 0.3)
        look: dict[str, Any] = {"facecolors": fills, "edgecolors": edges, "linewidth": width}
        ax.broken_barh(places, (y - BAR / 2, BAR), **look)


def _fill(event: StepEvent) -> str:
    return COLLECTIVE if event.lane == "collectives" else PHASES[event.phase]


def _name(ax: Axes, some: NamedEvents, inside: str, y: float, side: int, room: float) -> None:
    look: dict[str, Any] = {"ha": "center", "fontsize": FONT_POINTS}
    if inside:
        look.update(va="center_baseline", color=ink(_fill(some.events[0])))
        ax.text(some.middle, y, _figure.verbatim(inside), **look)
        return
    edge = y + side * (BAR / 2 + 3)
    if len(some.events) > 1:
        inset = min(0.15 * (some.end - some.start), 2 / _figure.points_wide(ax) * ax.get_xlim()[1])
        ax.plot([some.start + inset, some.end - inset], [edge, edge], color=EDGE, linewidth=1.0)
    name = _figure.shortened(some.names()[0], FONT_POINTS, room)
    look.update(rotation=90, va="bottom" if side > 0 else "top")
    ax.text(some.middle, edge + side * 3, _figure.verbatim(name), **look)


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
