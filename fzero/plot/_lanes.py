"""The picture of step timelines: a lane of compute above a lane of collectives, time along x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fzero.plot import _figure
from fzero.plot._palette import ABSENT, BASE, EDGE, ink
from fzero.plot._units import in_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fzero.plot._step import StepEvent, StepTimeline

FONT_POINTS = 7.0
UPRIGHT_POINTS = 10.0  # from one upright name to the next one
MOST_POINTS = 130.0  # of the length of an upright name
MOST_RATIO = 8.0  # of the lengths of steps that have one time axis
WIDE_INCHES, AXES_INCHES = 10.0, 9.0  # of a figure; nearly, of the axes in it
AROUND_INCHES = 1.2  # title, ticks, name of the axis, legend
BAR, GAP = 22.0, 14.0  # the height of a lane and what is between lanes, in points
PHASES = {"forward": BASE[0], "backward": BASE[1], "update": BASE[2], "": BASE[0]}
COLLECTIVE = BASE[6]


@dataclass(slots=True)
class Named:
    """Events that have one name together; a single one, as a rule."""

    events: list[StepEvent]

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
        """What may be written, the longest first."""
        first, count = self.events[0], len(self.events)
        if count == 1:
            return list(dict.fromkeys([_about(first), first.name]))
        if all(event.name == first.name for event in self.events):
            return [f"{count} x {first.name}"]
        longest = max(self.events, key=lambda event: event.duration_s)
        if 2 * longest.duration_s > sum(event.duration_s for event in self.events):
            return [f"{longest.name}, {count - 1} more"]
        return [f"{count} ops" if first.lane == "compute" else f"{count} collectives"]


def named(events: Sequence[StepEvent], points_per_s: float) -> list[tuple[Named, str]]:
    """Return the names of a lane, each with the text that fits into its bar; "" for one beside it.

    Names beside bars are upright. Where two of them would be nearer to each other than a line of
    text is high, and where events are at the same time, bars have one name. No bar has none.
    """
    found: list[Named] = []
    for event in sorted(events, key=lambda event: event.start_s):
        found.append(Named([event]))
        while len(found) > 1 and _too_near(found[-2], found[-1], points_per_s):
            last = found.pop()
            found[-1].events += last.events
    return [(some, _inside(some, points_per_s)) for some in found]


def _too_near(a: Named, b: Named, points_per_s: float) -> bool:
    if (a.end - b.start) * points_per_s > 1.0:  # at the same time
        return True
    if _inside(a, points_per_s) or _inside(b, points_per_s):
        return False
    return (b.middle - a.middle) * points_per_s < UPRIGHT_POINTS


def _inside(some: Named, points_per_s: float) -> str:
    """The longest name that fits into the bar: never into several bars."""
    room = (some.end - some.start) * points_per_s - 4.0 if len(some.events) == 1 else 0.0
    return next((name for name in some.names() if _points(name) <= room), "")


def _points(text: str) -> float:
    return _figure.text_points(text, FONT_POINTS)


def _upright(some: Named, room: float) -> str:
    """The name beside a bar, cut where there is no room for more."""
    return _figure.cut(some.names()[0], FONT_POINTS, room)


def _about(event: StepEvent) -> str:
    """The name of an event, and the first parameter that it is about."""
    paths = event.detail.partition(": ")[2].split(", ") if ": " in event.detail else []
    more = f" +{len(paths) - 1}" if len(paths) > 1 else ""
    return f"{event.name} {paths[0]}{more}" if paths else event.name


def draw(timeline: StepTimeline, ax: Axes | None) -> Axes:
    """Draw one timeline."""
    if ax is None:
        return stacked([timeline]).axes[0]
    _frame(ax, timeline, timeline.total_s)
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    _draw_lanes(ax, timeline)
    return ax


def stacked(timelines: Sequence[StepTimeline]) -> Figure:
    """Return a figure of timelines below each other."""
    longest = max(timeline.total_s for timeline in timelines)
    shares = longest <= MOST_RATIO * min(timeline.total_s for timeline in timelines)
    spans = [longest if shares else timeline.total_s for timeline in timelines]
    pairs = zip(timelines, spans, strict=True)
    heights = [
        _height(timeline, AXES_INCHES * 72 / (span or 1.0)) + AROUND_INCHES
        for timeline, span in pairs
    ]
    figure = _figure.new_figure((WIDE_INCHES, sum(heights)))
    every = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for timeline, span, ax in zip(timelines, spans, every, strict=True):
        _frame(ax, timeline, span)
        if not shares:
            ax.set_xlabel("time of this step alone: the axes differ", fontsize="small")
    figure.draw_without_rendering()  # from here on the axes have their size
    missing = [_missing(ax, timeline) for ax, timeline in zip(every, timelines, strict=True)]
    if max(missing) > 0:
        figure.set_figheight(sum(heights) + len(timelines) * max(missing))
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for timeline, ax in zip(timelines, every, strict=True):
        _draw_lanes(ax, timeline)
    return figure


def _lanes(timeline: StepTimeline) -> list[tuple[list[StepEvent], int]]:
    """The events of each lane, and on which side of it names are: 1 above, -1 below."""
    return [
        ([event for event in timeline.events if event.lane == lane], side)
        for lane, side in (("compute", 1), ("collectives", -1))
    ]


def _height(timeline: StepTimeline, points_per_s: float) -> float:
    """How high the axes must be for their upright names, in inches."""
    names = [named(events, points_per_s) for events, _ in _lanes(timeline)]
    return (2 * BAR + GAP + sum(map(_beside, names))) / 72


def _beside(names: Sequence[tuple[Named, str]]) -> float:
    """How many points the names beside the bars of a lane are high, with what is around them."""
    upright = (_upright(some, MOST_POINTS) for some, inside in names if not inside)
    return 16.0 + max(map(_points, upright), default=0.0)


def _missing(ax: Axes, timeline: StepTimeline) -> float:
    """How many inches the axes are too low for what is drawn."""
    wanted = _height(timeline, _figure.points_wide(ax) / ax.get_xlim()[1])
    return wanted - ax.get_window_extent().height / ax.figure.dpi


def _frame(ax: Axes, timeline: StepTimeline, span: float) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(0, span or 1.0)
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.tick_params(axis="x", labelsize="small")
    ax.set_yticks([0.7, 0.3], ["compute", "collectives"])
    ax.xaxis.set_major_formatter(lambda seconds, _: in_seconds(seconds))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8))
    title = f"{timeline.title}\n{timeline.summary()}"
    ax.set_title(_figure.verbatim(title), loc="left", fontsize="small")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    _key(ax, timeline)


def _draw_lanes(ax: Axes, timeline: StepTimeline) -> None:
    """Draw bars and names. A unit of y is a point; the names above and below share what is left."""
    high = ax.get_window_extent().height * 72 / ax.figure.dpi
    points_per_s = _figure.points_wide(ax) / (ax.get_xlim()[1] - ax.get_xlim()[0])
    ax.set_ylim(0, high)
    lanes = [(named(events, points_per_s), events, side) for events, side in _lanes(timeline)]
    wanted = [_beside(names) for names, *_ in lanes]
    share = (high - 2 * BAR - GAP) / sum(wanted)
    below, middles = wanted[1] * share, []
    for (names, events, side), room in zip(lanes, wanted, strict=True):
        y = below + BAR / 2 + (BAR + GAP if side > 0 else 0)
        middles.append(y)
        ax.barh(y, timeline.total_s, height=BAR, color=ABSENT, zorder=0.5)
        ax.broken_barh(
            [(event.start_s, event.duration_s) for event in events],
            (y - BAR / 2, BAR),
            facecolors=[_fill(event) for event in events],
            edgecolor="white",
            linewidth=0.3,
        )
        for some, inside in names:
            _name(ax, some, inside, y, side, room * min(share, 1.0) - 12)
    ax.set_yticks(middles, ["compute", "collectives"])


def _fill(event: StepEvent) -> str:
    return COLLECTIVE if event.lane == "collectives" else PHASES[event.phase]


def _name(ax: Axes, some: Named, inside: str, y: float, side: int, room: float) -> None:
    look: dict[str, Any] = {"ha": "center", "fontsize": FONT_POINTS}
    if inside:
        look.update(va="center_baseline", color=ink(_fill(some.events[0])))
        ax.text(some.middle, y, _figure.verbatim(inside), **look)
        return
    edge = y + side * (BAR / 2 + 3)
    if len(some.events) > 1:
        inset = min(0.15 * (some.end - some.start), 2 / _figure.points_wide(ax) * ax.get_xlim()[1])
        ax.plot([some.start + inset, some.end - inset], [edge, edge], color=EDGE, linewidth=1.0)
    look.update(rotation=90, va="bottom" if side > 0 else "top")
    ax.text(some.middle, edge + side * 3, _figure.verbatim(_upright(some, room)), **look)


def _key(ax: Axes, timeline: StepTimeline) -> None:
    from matplotlib.patches import Patch

    seen = {event.phase for event in timeline.events if event.lane == "compute"} - {""}
    handles = [Patch(color=PHASES[phase], label=phase) for phase in PHASES if phase in seen]
    if handles:
        _figure.legend_below(ax, handles)
