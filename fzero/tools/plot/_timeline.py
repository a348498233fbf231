"""The hook record, event by event, in a backward: data, table and picture."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fzero.errors import LayoutError
from fzero.state.effects import DropBackward, HookEffects, QueueCallback, RunEpilogue
from fzero.state.hook_state import BackwardPhase, HookState
from fzero.tools.plot import _figure
from fzero.tools.plot._html import Table, html_table
from fzero.tools.plot._palette import ABSENT, BASE, EDGE, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = ("", "event", "graph task", "depth", "fired/expected", "phase", "callback of", "effects")
INCHES_AN_EVENT = 0.5
INCHES_A_LANE = 0.27
FONT_POINTS = 7.5
MARK = 8.0
GAP = 0.6  # between lanes, in lanes
SIDE = 0.75  # of the axis before the first event and after the last, in events
OUTSIDE = "hook outside a backward"
COUNT_LANES = 3.0  # how high the two counts are drawn
PHASES = {
    BackwardPhase.IDLE: ABSENT,
    BackwardPhase.RUNNING: BASE[0],
    BackwardPhase.REDUCED: BASE[2],
    BackwardPhase.LATE: BASE[6],
    BackwardPhase.COMPLETE: BASE[2],
}
# effect -> its name, and its mark in the picture: shape, colour, size
EFFECTS: dict[type, tuple[str, str, str, float]] = {
    QueueCallback: ("queue callback", "v", BASE[1], 1.0),
    RunEpilogue: ("run epilogue", "*", BASE[2], 1.9),
    DropBackward: ("drop backward", "X", BASE[6], 1.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HookEvent:
    """One event of the hook record: the states before and after it, and its effects.

    `name` is any words. `parameter` names the parameter whose gradient hook fired, and is None
    for every other event; `graph_task` is the autograd engine's task that was running, None for
    an event outside of every backward. An event that is no transition has equal states.

    Example:
        >>> from fzero.state import hooks
        >>> after, effects = hooks.enter_backward(HookState())
        >>> HookEvent(name="enter", before=HookState(), after=after, effects=effects).label
        'enter'
    """

    name: str
    before: HookState
    after: HookState
    effects: HookEffects = ()
    parameter: str | None = None
    graph_task: int | None = None

    @property
    def label(self) -> str:
        """The name, and the parameter if there is one."""
        return self.name if self.parameter is None else f"{self.name} {self.parameter}"

    @property
    def counted(self) -> bool:
        """Whether a hook of the user's backward fired at this event."""
        fired = self.after.hooks_fired_this_backward
        return self.parameter is not None and fired > self.before.hooks_fired_this_backward


@dataclass(frozen=True, slots=True, repr=False)
class HookTimeline(Table):
    """Events in their order. Plain data; prints as text, and as HTML in a notebook."""

    events: tuple[HookEvent, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row of strings for each event: its number, and what the record is after it."""
        return [
            (str(i), event.label, _shown(event.graph_task), *_cells(event.after), _effects(event))
            for i, event in enumerate(self.events, 1)
        ]

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return HEADER, self.rows()

    def draw(self, ax: Axes | None = None, *, title: str = "") -> Axes:
        """Draw the timeline on `ax` (default: a new figure) and return the axes.

        Event numbers run along x. From the top: how deep the user's backwards are, the phase,
        the engine's graph tasks (nested ones below), a mark for each hook, the counts, effects.

        Raises `MissingExtraError` (an `ImportError`) where matplotlib is not installed.
        """
        return _draw(self.events, ax, title)

    def _repr_html_(self) -> str:
        rows = []
        for event, row in zip(self.events, self.rows(), strict=True):
            cells = [html.escape(cell) for cell in row]
            for i, old in enumerate(_cells(event.before), 3):  # in bold: what this event changed
                cells[i] = cells[i] if row[i] == old else f"<b>{cells[i]}</b>"
            rows.append(cells)
        return html_table(HEADER, rows)


def hook_timeline(events: Sequence[HookEvent]) -> HookTimeline:
    """Return the timeline of one hook record, for a table or a picture.

    Raises `LayoutError` for no events, and for events that do not follow one another: each must
    begin with the state that the one before it ended with.

    Example:
        >>> from fzero.state import hooks
        >>> once, _ = hooks.enter_backward(HookState())
        >>> twice, effects = hooks.queue_post_backward_callback(once, graph_task_id=7)
        >>> hook_timeline([
        ...     HookEvent(name="enter", before=HookState(), after=once, graph_task=7),
        ...     HookEvent(name="queue", before=once, after=twice, effects=effects, graph_task=7),
        ... ])
           event  graph task  depth  fired/expected  phase    callback of  effects
        1  enter  7           1      0/0             running
        2  queue  7           1      0/0             running  7            queue callback 7
    """
    events = tuple(events)
    if not events:
        raise LayoutError(
            "hook_timeline: no events.",
            cause="nothing was recorded: the backward ran before the hooks were registered.",
            fix="record a HookEvent for each transition, and give at least one.",
        )
    for i, (one, two) in enumerate(pairwise(events), 1):
        if one.after != two.before:
            raise LayoutError(
                f"hook_timeline: event {i} ({one.label}) ends with {one.after}, and event "
                f"{i + 1} ({two.label}) begins with {two.before}.",
                cause="an event was left out, or the events are those of two records.",
                fix="give the events of one record, in their order, without gaps.",
            )
    return HookTimeline(events)


def _cells(s: HookState) -> tuple[str, ...]:
    counts = f"{s.hooks_fired_this_backward}/{s.max_expected_hooks_seen}"
    counts += f", {s.hooks_outside_backward} outside" if s.hooks_outside_backward else ""
    queued = _shown(s.post_backward_callback_graph_task_id)
    return (str(s.backward_active_depth), counts, s.phase.value, queued)


def _effects(event: HookEvent) -> str:
    task = [getattr(effect, "graph_task_id", None) for effect in event.effects]
    names = [EFFECTS[type(effect)][0] for effect in event.effects]
    return ", ".join(f"{n} {_shown(t)}".rstrip() for n, t in zip(names, task, strict=True))


def _shown(number: int | None) -> str:
    return "" if number is None else str(number)


# The picture. A state holds from its event to the next one; lanes have y = 0 at the bottom.


def _draw(events: Sequence[HookEvent], ax: Axes | None, title: str) -> Axes:
    tasks = _tasks(events)
    deepest = max(1, *(s.backward_active_depth for s in _states(events)))
    heights = {
        "effects": 1.0,
        "hooks counted": COUNT_LANES,
        "hooks": 1.0,
        "graph tasks": max((row for *_, row in tasks), default=0) + 1.0,
        "phase": 1.0,
        "user backward": float(deepest),
    }
    bottoms, top = {}, 0.0
    for name, height in heights.items():
        bottoms[name] = top
        top += height + GAP
    if ax is None:
        width = max(2.0 + INCHES_AN_EVENT * len(events), 7.0)
        ax = _figure.new_figure((width, 2.2 + INCHES_A_LANE * top)).add_subplot()
    _frame(ax, events, top)
    _draw_depth(ax, events, bottoms["user backward"], deepest)
    for start, stop, phase in _runs([s.phase for s in _states(events)]):
        _bar(ax, start, stop, bottoms["phase"], PHASES[phase], (phase.value,))
    highest = bottoms["graph tasks"] + heights["graph tasks"] - 1
    for task, first, last, row in tasks:
        names = (f"graph task {task}", f"task {task}", str(task))
        _bar(ax, first - 0.4, last + 0.4, highest - row, BASE[5 if row else 1], names)
    _draw_hooks(ax, events, bottoms["hooks"] + 0.5)
    _draw_counts(ax, events, bottoms["hooks counted"])
    _draw_effects(ax, events, bottoms["effects"] + 0.5, top)
    ax.set_yticks([bottoms[n] + heights[n] / 2 for n in heights], list(heights))
    lines = _legend(ax)
    if title:
        ax.set_title(title, loc="left", fontweight="bold", pad=9 + 17 * lines)
    return ax


def _frame(ax: Axes, events: Sequence[HookEvent], top: float) -> None:
    names = [f"{_figure.verbatim(event.label)}  {i}" for i, event in enumerate(events, 1)]
    tilt: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(range(1, len(names) + 1), names, fontsize=FONT_POINTS, **tilt)
    ax.set_xlim(1 - SIDE, len(events) + SIDE)
    ax.set_ylim(-0.3, top - GAP + 0.3)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color=ABSENT, linewidth=0.8)
    ax.tick_params(axis="y", length=0, labelsize=FONT_POINTS + 1)
    ax.tick_params(axis="x", length=3, color=EDGE)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _legend(ax: Axes) -> int:
    """Draw the legend of the marks above the axes; return its number of lines."""
    names = ax.get_legend_handles_labels()[1]
    size = FONT_POINTS + 0.5
    points = sum(_figure.text_points(name, size) + 5 * size for name in names)
    lines = math.ceil(points / _figure.points_wide(ax))
    look: dict[str, Any] = {"frameon": False, "fontsize": size, "handletextpad": 0.4}
    columns = math.ceil(len(names) / lines)
    ax.legend(loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=columns, **look)
    return lines


def _draw_depth(ax: Axes, events: Sequence[HookEvent], bottom: float, deepest: int) -> None:
    for depth in range(1, deepest + 1):
        for start, stop, _ in _runs([s.backward_active_depth >= depth for s in _states(events)]):
            _bar(ax, start, stop, bottom + depth - 1, BASE[4], (f"depth {depth}", str(depth)))


def _draw_hooks(ax: Axes, events: Sequence[HookEvent], y: float) -> None:
    fired = [(i, e.counted) for i, e in enumerate(events, 1) if e.parameter is not None]
    look: dict[str, Any] = {"markeredgecolor": BASE[3], "markersize": MARK, "markeredgewidth": 1.6}
    for counted, label, fill in ((True, "hook", BASE[3]), (False, OUTSIDE, "white")):
        if xs := [x for x, was in fired if was is counted]:
            ax.plot(xs, [y] * len(xs), "o", label=label, markerfacecolor=fill, **look)


def _draw_counts(ax: Axes, events: Sequence[HookEvent], bottom: float) -> None:
    states = _states(events)
    fired = [s.hooks_fired_this_backward for s in states]
    expected = [s.max_expected_hooks_seen for s in states]
    most = max(*fired, *expected, 1)
    xs = [1 - SIDE, *range(1, len(events) + 1), len(events) + SIDE]
    for numbers, label, look in (
        (expected, "expected", {"color": BASE[1], "linewidth": 5.0, "alpha": 0.6}),
        (fired, "fired", {"color": "black", "linewidth": 1.4}),
    ):
        ys = [bottom + COUNT_LANES * n / most for n in [*numbers, numbers[-1]]]
        ax.step(xs, ys, where="post", label=label, solid_capstyle="butt", **look)
    for number in range(0, most + 1, math.ceil(most / 3)):  # at most four ticks
        y = bottom + COUNT_LANES * number / most
        ax.plot(xs[:: len(xs) - 1], [y, y], color=ABSENT, linewidth=0.8, zorder=0.5)
        ax.text(xs[-1], y, f" {number}", va="center", fontsize=FONT_POINTS, color=EDGE)


def _draw_effects(ax: Axes, events: Sequence[HookEvent], y: float, top: float) -> None:
    """Draw a mark for each effect, and a line for as long as a callback is queued."""
    for start, stop, _ in _runs([s.post_backward_callback_queued for s in _states(events)]):
        ax.plot([start, stop], [y, y], color=BASE[1], linewidth=1.4, zorder=1.5)
    for kind, (name, shape, fill, size) in EFFECTS.items():
        xs = [i for i, e in enumerate(events, 1) if any(isinstance(f, kind) for f in e.effects)]
        if xs:
            look: dict[str, Any] = {"color": fill, "markeredgecolor": "white", "zorder": 3}
            ax.plot(xs, [y] * len(xs), shape, markersize=MARK * size, label=name, **look)
        for x in xs if kind is not QueueCallback else ():
            ax.plot([x, x], [y, top - GAP], color=fill, linewidth=1.2, linestyle=":", zorder=0.7)


def _bar(ax: Axes, start: float, stop: float, y: float, fill: str, names: tuple[str, ...]) -> None:
    """Draw a bar one lane high, with the first of `names` that fits into it."""
    left, right = ax.get_xlim()
    room = (stop - start) / (right - left) * _figure.points_wide(ax)
    look: dict[str, Any] = {"color": fill, **_figure.edge_of(fill, room)}
    ax.barh(y + 0.5, stop - start, left=start, height=0.84, **look)
    if name := _figure.fitting(names, FONT_POINTS, room):
        look = {"ha": "center", "va": "center_baseline", "fontsize": FONT_POINTS}
        ax.text((start + stop) / 2, y + 0.5, name, color=ink(fill), **look)


def _states(events: Sequence[HookEvent]) -> list[HookState]:
    """Return the states in their order; one more than there are events."""
    return [events[0].before, *(event.after for event in events)]


def _runs(values: Sequence[Any]) -> list[tuple[float, float, Any]]:
    """Return (start, stop, value) for each stretch of one true value, `values[i]` from event i."""
    return [
        (start or 1 - SIDE, stop if stop < len(values) else stop - 1 + SIDE, value)
        for start, stop, value in _figure.stretches(values)
        if value
    ]


def _tasks(events: Sequence[HookEvent]) -> list[tuple[int, int, int, int]]:
    """Return (task, first event, last event, row): a task that runs inside another is lower.

    While an engine's task is running, so is the one whose callback is queued: it ends later.
    """
    seen: dict[int, list[int]] = {}
    for i, event in enumerate(events, 1):
        waits = event.after.post_backward_callback_graph_task_id
        for task in {event.graph_task, waits} - {None} if event.graph_task is not None else ():
            seen.setdefault(task, []).append(i)
    found: list[tuple[int, int, int, int]] = []
    for task, at in sorted(seen.items(), key=lambda item: (item[1][0], -item[1][-1])):
        taken = {row for _, first, last, row in found if first <= at[-1] and at[0] <= last}
        row = next(row for row in range(len(found) + 1) if row not in taken)
        found.append((task, at[0], at[-1], row))
    return found
