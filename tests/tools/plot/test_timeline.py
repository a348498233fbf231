"""The hook timeline: table and picture have what the events say, neither more nor less."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.state import hooks
from fzero.state.effects import DropBackward, QueueCallback, RunEpilogue
from fzero.state.hooks import HookState
from fzero.tools.plot import HookEvent, HookTimeline, hook_timeline
from tests.tools.plot.test_views import parsed

Step = tuple[str, int | None]  # what happens, and in which graph task

CALLBACK: list[Step] = [
    ("reset", None),
    ("enter", 7),
    ("queue", 7),
    ("hook a", 7),
    ("hook b", 8),
    ("hook c", 8),
    ("note", 7),
    ("hook d", 9),
    ("completed", 7),
    ("note", None),
]
COUNTING: list[Step] = [("enter", 7), ("count a", 7), ("exit", 7), ("re-enter", 8), ("count b", 8)]
TRANSITIONS: dict[str, Callable[..., Any]] = {
    "reset": hooks.reset_for_new_step,
    "enter": hooks.enter_backward,
    "exit": hooks.exit_backward,
    "re-enter": hooks.reenter_backward_if_needed,
    "completed": hooks.graph_completed,
}
STEPS = st.tuples(
    st.sampled_from([*TRANSITIONS, "queue", "note", "hook a", "hook b", "count a"]),
    st.none() | st.integers(0, 3),
)


def recorded(steps: Sequence[Step]) -> list[HookEvent]:
    state, events = HookState(), []
    for words, task in steps:
        name, _, parameter = words.partition(" ")
        before, effects = state, ()
        if parameter:
            state, effects = hooks.update_hook_state_and_maybe_run_epilogue(
                state,
                expected=state.hooks_fired_this_backward + 1,
                graph_task_id=task if name == "hook" else None,
            )
        elif name == "queue":
            state, effects = hooks.queue_post_backward_callback(state, graph_task_id=task)
        elif name != "note":
            state, effects = TRANSITIONS[name](state)
        events.append(
            HookEvent(
                name=name,
                before=before,
                after=state,
                effects=effects,
                parameter=parameter or None,
                graph_task=task,
            )
        )
    return events


def marks(timeline: HookTimeline) -> dict[str, list[float]]:
    """Return where the marks are, by what the legend calls them."""
    lines = timeline.draw().get_lines()
    return {
        str(line.get_label()): [float(x) for x in line.get_xdata()]  # type: ignore[union-attr]
        for line in lines
        if not str(line.get_label()).startswith("_")
    }


def bars(timeline: HookTimeline, y_of: str) -> list[tuple[float, float]]:
    """Return (left, right) of the bars in one lane, from left to right."""
    ax = timeline.draw()
    centres = {
        tick.get_text(): y for tick, y in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)
    }
    found = []
    for bar in ax.patches:
        x, y = bar.get_xy()
        width, height = bar.get_width(), bar.get_height()
        nearest = min(centres, key=lambda name: abs(centres[name] - y - height / 2))
        if nearest == y_of:
            found.append((float(x), float(x + width)))
    return sorted(found)


def texts(timeline: HookTimeline) -> list[str]:
    return [text.get_text().strip() for text in timeline.draw().texts]


@given(steps=st.lists(STEPS, min_size=1, max_size=8))
def test_marks_are_the_events(steps: list[Step]) -> None:
    events = recorded(steps)
    found = marks(hook_timeline(events))
    hook_marks = found.get("hook", []) + found.get("hook outside a backward", [])
    assert sorted(hook_marks) == [i for i, event in enumerate(events, 1) if event.parameter]
    for name, kind in {
        "queue callback": QueueCallback,
        "run epilogue": RunEpilogue,
        "drop backward": DropBackward,
    }.items():
        at = [i for i, e in enumerate(events, 1) if any(isinstance(f, kind) for f in e.effects)]
        assert found.get(name, []) == at


def test_hooks_at_depth_0_have_their_own_mark() -> None:
    timeline = hook_timeline(recorded([("hook a", 3), ("enter", 4), ("hook a", 4)]))
    found = marks(timeline)
    assert found["hook outside a backward"] == [1] and found["hook"] == [3]
    assert timeline.rows()[0][4] == "0/0, 1 outside"


def test_the_picture_has_labels_graph_tasks_and_counts() -> None:
    timeline = hook_timeline(recorded(CALLBACK))
    ax = timeline.draw()
    labels = [tick.get_text() for tick in ax.get_xticklabels()]
    assert labels == [f"{event.label}  {i}" for i, event in enumerate(timeline.events, 1)]
    assert labels[3] == "hook a  4"
    outer, *nested = bars(timeline, "graph tasks")
    assert outer == (1.6, 9.4) and nested == [(4.6, 6.4), (7.6, 8.4)]
    words = texts(timeline)
    assert "graph task 7" in words and {"8", "9"} <= {word.split(" ")[-1] for word in words}
    (line,) = [line for line in ax.get_lines() if line.get_label() == "fired"]
    fired = [float(y) for y in line.get_ydata()]  # type: ignore[union-attr]
    rises = [i for i, (y, z) in enumerate(pairwise(fired)) if z > y]
    assert rises == [3, 4, 5, 7]  # index 0 is the edge, event i sets the height from index i on
    assert {"0", "2", "4"} <= set(words)


def test_a_task_that_waits_for_its_callback_runs_on_to_where_a_nested_one_raised() -> None:
    steps: list[Step] = [("enter", 7), ("queue", 7), ("hook a", 7), ("hook b", 8), ("note", None)]
    outer, nested = bars(hook_timeline(recorded(steps)), "graph tasks")
    assert outer == (0.6, 4.4) and nested == (3.6, 4.4)


def test_depth_and_phase_are_bars_as_long_as_they_last() -> None:
    timeline = hook_timeline(recorded(COUNTING))
    assert bars(timeline, "user backward") == [(1, 3), (4, 5.75)]
    assert bars(timeline, "phase") == [(0.25, 1), (1, 2), (2, 4), (4, 5), (5, 5.75)]
    words = texts(timeline)
    assert words.count("depth 1") == 2 and words.count("running") == 2
    twice = hook_timeline(recorded([("enter", 1), ("enter", 1), ("exit", 1)]))
    assert texts(twice).count("depth 2") == 1
    assert len(bars(twice, "user backward")) == 2


def test_the_table_says_what_the_record_is_after_each_event() -> None:
    timeline = hook_timeline(recorded(COUNTING))
    assert timeline.table() == repr(timeline)
    assert timeline.rows()[1] == ("2", "count a", "7", "1", "1/1", "reduced", "", "run epilogue")
    assert hook_timeline(recorded(CALLBACK)).rows()[2][-2:] == ("7", "queue callback 7")
    dropped = hook_timeline(recorded([("enter", 1), ("hook a", 1), ("reset", None)]))
    assert dropped.rows()[2][-1] == "drop backward"


def test_html_is_whole_escaped_and_bold_where_something_changed() -> None:
    timeline = hook_timeline(recorded([("enter", 1), ("note", 1), ("hook <i>", 1)]))
    text = timeline._repr_html_()
    page = parsed(text)
    assert page.seen.count("tr") == 4 and page.seen.count("th") == 8
    assert "hook &lt;i&gt;" in text and "i" not in page.seen
    assert page.seen.count("b") == 4  # depth, phase; counts, callback
    assert "<b>1/1</b>" in text and "<b>running</b>" in text


def test_no_events_and_a_gap_between_events_are_refused() -> None:
    with pytest.raises(fzero.LayoutError, match=r"no events[\s\S]*Fix: record a HookEvent for"):
        hook_timeline([])
    events = recorded(CALLBACK)
    with pytest.raises(fzero.LayoutError, match=r"event 3 \(queue\) ends with .*\n.*left out"):
        hook_timeline([*events[:3], *events[4:]])


@pytest.mark.parametrize("count", [1, 2, 40])
def test_any_length_is_drawn_without_a_warning_and_names_do_not_touch(count: int) -> None:
    steps: list[Step] = [("enter", 1), *[("hook layers.0.$x$", 1)] * (count - 1)]
    figure = hook_timeline(recorded(steps)).draw(title="$").figure
    figure.savefig(io.BytesIO())
    (ax,) = figure.axes
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
    boxes += [ax.title.get_window_extent(), *(t.get_window_extent() for t in ax.get_yticklabels())]
    legend = ax.get_legend()
    assert legend is not None
    boxes.append(legend.get_window_extent())
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    right = figure.bbox.x1
    assert all(box.x0 >= 0 and box.x1 <= right for box in boxes)
