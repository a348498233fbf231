"""Transitions of the window and of the counters; each leaves the record it was given alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.errors import PhaseError
from fzero.state import Buffers, Placement, Progress, Window, progress, window
from tests.strategies import integers, same, seeds


def local(seed: int, n: int = 3) -> Buffers:
    return Buffers(flats=(integers((n,), seed),), placement=Placement.PARTIAL)


@given(seeds_=st.lists(seeds, max_size=4))
def test_a_window_is_the_sum_of_what_was_put_into_it(seeds_: list[int]) -> None:
    opened = window.open_window(window.CLOSED)
    w = opened
    for seed in seeds_:
        w = window.put(w, local(seed))
    assert w.is_open
    assert not opened.pending.held
    emptied, pending = window.take(w)
    assert emptied.is_open
    assert not emptied.pending.held
    assert pending.held == bool(seeds_)
    if seeds_:
        same(pending.flats[0], torch.stack([local(s).flats[0] for s in seeds_]).sum(0))
        assert w.pending.held
    closed = window.close(emptied)
    assert not closed.is_open
    assert not closed.gathered


def test_what_is_gathered_goes_with_the_gradients_unless_it_is_to_stay() -> None:
    w = Window(pending=local(0), gathered=(torch.ones(1),), is_open=True)
    assert window.take(w)[0].gathered == ()
    assert window.take(w, keep_gathered=True)[0].gathered is w.gathered
    assert window.put(w, local(1)).gathered is w.gathered


def test_illegal_transitions_are_refused_and_leave_the_window() -> None:
    opened = window.put(window.open_window(window.CLOSED), local(0))
    with pytest.raises(PhaseError, match=r"already open[\s\S]*Fix: keep only the outer"):
        window.open_window(opened)
    with pytest.raises(PhaseError, match=r"unreduced gradients[\s\S]*Fix: take the pending"):
        window.close(opened)
    with pytest.raises(PhaseError, match="a sharded gradient met a partial one"):
        window.put(opened, Buffers(flats=(torch.ones(3),), placement=Placement.SHARDED))
    same(opened.pending.flats[0], integers((3,), 0))


@given(reduced=st.lists(st.booleans(), max_size=5))
def test_counters_count_and_an_update_resets_them(reduced: list[bool]) -> None:
    p = Progress()
    for r in reduced:
        p = progress.saw_backward(p, reduced=r)
    p = progress.saw_reduction(p)
    assert (p.backwards, p.reductions) == (len(reduced), sum(reduced) + 1)
    if reduced:
        assert progress.saw_update(p) == Progress()
        return
    with pytest.raises(PhaseError, match=r"holds no gradients[\s\S]*Fix: write `state, loss"):
        progress.saw_update(p)
