"""The hook timeline: table and picture have what the events say, neither more nor less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tests.tools.plot.traces import assert_legible

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


EFFECTS = {
    "queue callback": QueueCallback,
    "run epilogue": RunEpilogue,
    "drop backward": DropBackward,
}


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


@given(steps=st.lists(STEPS, min_size=1, max_size=8))
def test_rows_are_the_events(steps: list[Step]) -> None:
    events = recorded(steps)
    rows = hook_timeline(events).rows()
    for number, (row, event) in enumerate(zip(rows, events, strict=True), 1):
        task = "" if event.graph_task is None else str(event.graph_task)
        depth, phase = event.after.backward_active_depth, event.after.phase.value
        assert (row[0], row[1], row[2], row[3], row[5]) == (
            *(str(number), event.label, task, str(depth), phase),
        )
        for name, kind in EFFECTS.items():
            assert (name in row[-1]) == any(isinstance(one, kind) for one in event.effects)
        outside = event.after.hooks_outside_backward
        fired, expected = row[4].partition(",")[0].split("/")
        assert int(fired) == event.after.hooks_fired_this_backward
        assert int(expected) == event.after.max_expected_hooks_seen
        assert row[4].endswith(f", {outside} outside") == (outside > 0)


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
def test_a_picture_of_any_length_is_legible_and_names_the_events(count: int) -> None:
    steps: list[Step] = [("enter", 1), *[("hook layers.0.$x$", 1)] * (count - 1)]
    ax = hook_timeline(recorded(steps)).draw(title="$")
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels[0] == "enter  1" and len(labels) == count
    ax.set_xticks([])  # they are tilted: their boxes meet, and they do not
    assert_legible(ax.figure)
    words = [text.get_text() for text in hook_timeline(recorded(CALLBACK)).draw().texts]
    assert {"graph task 7", "running"} <= {*words}


def centres(timeline: HookTimeline, *names: str) -> list[float]:
    """Where the bars of these names are, from left to right."""
    written = [(text.get_position()[0], text.get_text()) for text in timeline.draw().texts]
    return sorted(float(x) for x, text in written if text in names)


def test_bars_are_as_long_as_what_they_name() -> None:
    """A task that waits for its callback runs on to where a nested one raised."""
    steps: list[Step] = [("enter", 7), ("queue", 7), ("hook a", 7), ("hook b", 8), ("note", None)]
    tasks = hook_timeline(recorded(steps))
    assert centres(tasks, "graph task 7", "graph task 8", "task 8", "8") == [
        (0.6 + 4.4) / 2,
        (3.6 + 4.4) / 2,
    ]
    counting = hook_timeline(recorded(COUNTING))
    assert centres(counting, "depth 1") == [(1 + 3) / 2, (4 + 5.75) / 2]
    twice = hook_timeline(recorded([("enter", 1), ("enter", 1), ("exit", 1)]))
    assert len(centres(twice, "depth 2")) == 1
