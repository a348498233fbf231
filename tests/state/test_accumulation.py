"""What an engine has accumulated: any events against a model of history, laws, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.errors import PhaseError
from fzero.state import accumulation as acc
from fzero.state.accumulation import Accumulation

KINDS = ("coalesce", "no_sync")
EVENTS = st.one_of(
    st.sampled_from([("open", kind) for kind in KINDS]),
    st.sampled_from([(name,) for name in ("close", "backward", "local", "reduction", "update")]),
    st.sampled_from([("step", 1), ("step", 3), ("clear",), ("agree", (0,)), ("agree", (4, 1, 10))]),
    st.tuples(st.just("agree"), st.lists(st.integers(0, 15), min_size=1, max_size=3)),
)
STATES = st.builds(
    Accumulation,
    backwards=st.integers(0, 3),
    micro_steps=st.integers(0, 3),
    updates=st.integers(0, 3),
    window=st.sampled_from(["", *KINDS]),
    waiting=st.booleans(),
    reduced=st.booleans(),
)

History = list[tuple[Any, ...]]


def window_of(history: History) -> str:
    ends = [event for event in history if event[0] in ("open", "close")]
    return ends[-1][1] if ends and ends[-1][0] == "open" else ""


def since_update(history: History) -> tuple[int, History]:
    """Where the history since the last update or clear begins, and that part of it."""
    ends = [i for i, event in enumerate(history) if event[0] in ("update", "clear")]
    begin = ends[-1] + 1 if ends else 0
    return begin, history[begin:]


def flag_of(history: History, *, waiting: bool) -> bool:
    """Whether gradients wait (or are reduced): decided by the latest event that says so."""
    begin, events = since_update(history)
    for at in range(len(events) - 1, -1, -1):
        name, *args = events[at]
        inside = bool(window_of(history[: begin + at]))
        if name == "backward" and inside is waiting:
            return True
        if name == "reduction" or (name == "local" and waiting):
            return name == "local" or not waiting
        if name == "agree":  # of what this rank had before, only what is among the codes stays
            return any(code >> (not waiting) & 1 for code in args[0])
    return False


def backwards_of(history: History) -> int:
    """Those seen since the ranks last agreed, and as many as any of them had then."""
    events = since_update(history)[1]
    agreed = [at for at, event in enumerate(events) if event[0] == "agree"]
    most = max(code // 4 for code in events[agreed[-1]][1]) if agreed else 0
    since = events[agreed[-1] :] if agreed else events
    return most + [event[0] for event in since].count("backward")


def expected(history: History) -> Accumulation:
    events = since_update(history)[1]
    names = [event[0] for event in events]
    return Accumulation(
        backwards=backwards_of(history),
        micro_steps=names.count("step"),
        updates=[event[0] for event in history].count("update"),
        window=window_of(history),
        waiting=flag_of(history, waiting=True),
        reduced=flag_of(history, waiting=False),
    )


def happen(s: Accumulation, event: tuple[Any, ...], history: History) -> Accumulation:
    """Make the transition and note it; one that must be refused changes nothing."""
    name, *args = event
    window = window_of(history)
    if name in ("open", "step") and window:
        match = f"{args[0]}\\(\\) inside" if name == "open" else "step\\(\\) inside"
        with pytest.raises(PhaseError, match=f"{match} {window}\\(\\)"):
            acc.open_window(s, args[0]) if name == "open" else acc.call_step(s, args[0])
        return s
    if name == "update" and window:
        return s  # step() raised before
    history.append(event)
    if name == "open":
        return acc.open_window(s, args[0])
    if name == "step":
        due = acc.call_step(s, args[0])
        assert due[1] == (due[0].micro_steps >= args[0])
        return due[0]
    if name == "agree":
        return acc.agree(s, args[0])
    transitions = {
        "close": acc.close_window,
        "backward": acc.saw_backward,
        "local": acc.saw_local,
        "reduction": acc.saw_reduction,
        "update": acc.updated,
        "clear": acc.cleared,
    }
    return transitions[name](s)


@settings(max_examples=500)
@given(st.lists(EVENTS, max_size=25))
def test_any_events_in_any_order_are_what_their_history_says(events: History) -> None:
    s, history = Accumulation(), []
    for event in events:
        s = happen(s, event, history)
        assert s == expected(history)
        assert s.held == (s.code % 4 != 0)
        assert s.keeps == (s.waiting or window_of(history) != "")


@given(st.integers(1, 6), st.integers(1, 4))
def test_the_update_is_due_at_every_nth_call_of_step_and_at_no_other(n: int, rounds: int) -> None:
    s, calls = Accumulation(), []
    for _ in range(n * rounds):
        s, due = acc.call_step(s, n)
        calls.append(due)
        s = acc.updated(s) if due else s
    assert calls == ([False] * (n - 1) + [True]) * rounds
    assert s == Accumulation(updates=rounds)


@given(st.lists(STATES, min_size=1, max_size=4))
def test_after_agreeing_every_rank_holds_what_any_rank_held(ranks: Sequence[Accumulation]) -> None:
    codes = [s.code for s in ranks]
    for s in ranks:
        agreed = acc.agree(s, codes)
        assert agreed.waiting == any(other.waiting for other in ranks)
        assert agreed.reduced == any(other.reduced for other in ranks)
        assert acc.agree(agreed, [agreed.code] * len(ranks)) == agreed
        assert agreed.backwards == max(other.backwards for other in ranks)
        kept = ("micro_steps", "updates", "window")
        assert all(getattr(agreed, name) == getattr(s, name) for name in kept)


@given(STATES)
def test_an_update_leaves_only_the_count_of_updates(s: Accumulation) -> None:
    assert acc.updated(s) == Accumulation(updates=s.updates + 1)


@given(STATES)
def test_a_clear_keeps_the_window_and_the_count_of_updates(s: Accumulation) -> None:
    assert acc.cleared(s) == Accumulation(updates=s.updates, window=s.window)


@given(STATES, st.sampled_from(KINDS))
def test_a_window_changes_nothing_but_the_window(s: Accumulation, kind: str) -> None:
    if s.window:
        s = acc.close_window(s)
    opened = acc.open_window(s, kind)
    assert opened.window == kind
    assert acc.close_window(opened) == s


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_a_window_inside_a_window_is_refused_with_both_names(outer: str, inner: str) -> None:
    s = acc.open_window(Accumulation(), outer)
    with pytest.raises(PhaseError, match=rf"{inner}\(\) inside {outer}\(\)[\s\S]*keep the outer"):
        acc.open_window(s, inner)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_inside_a_window_is_refused_and_says_what_to_leave(kind: str) -> None:
    s = acc.open_window(Accumulation(), kind)
    with pytest.raises(PhaseError, match=rf"step\(\) inside {kind}\(\)[\s\S]*engine\.{kind}\(\)"):
        acc.call_step(s, 1)


@given(STATES)
def test_gradients_are_required_by_name_where_there_are_none(s: Accumulation) -> None:
    if s.held:
        assert acc.require_gradients(s, "step()") is s
        return
    with pytest.raises(PhaseError, match=rf"step\(\): there are no gradients; {s.updates} updates"):
        acc.require_gradients(s, "step()")
