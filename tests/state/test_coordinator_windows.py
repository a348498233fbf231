"""Between the steps of a window parameters do not change: what comes soon stays gathered."""

from __future__ import annotations

import pytest

from fzero.state.coordinator import (
    abort,
    begin_step,
    begin_window,
    end_step,
    end_window,
    fetch,
    release,
    updated,
)
from fzero.state.coordinator_effects import Gather, Release
from tests.state.coordinator_example import A, B, C, D, calls, made, of, play


@pytest.mark.parametrize(
    ("reach", "gathered_again"),
    [(99, []), (7, []), (4, [(2,)]), (2, [(1,), (2,)]), (0, [(0,), (1,), (2,)])],
)
def test_in_a_window_the_next_step_finds_what_it_uses_soon(
    reach: int, gathered_again: list[tuple[int, ...]]
) -> None:
    """Steps use 1, 2 and 4 elements: u0, u1, u2, and then u2, u1, u0 in backward."""
    step = [*calls(A, B, C), (fetch, C), (release, C), *calls(B, A), (end_step,)]
    s = made(max_reuse_distance_numel=reach)
    s, _ = play(s, (begin_step,), *step, (begin_window,), (begin_step,), *step)
    before = s
    s, effects = play(s, (begin_step,), *calls(A, B, C))
    assert of(Gather, effects) == gathered_again
    s, effects = end_window(before)
    assert (s.residency, s.repeats) == (made().residency, False)
    assert not of(Gather, play(begin_window(before)[0], (end_step,), (end_window,))[1])


def test_in_a_window_what_the_order_uses_last_leaves_first_when_there_is_no_room() -> None:
    step = [(begin_step,), *calls(A, B, D, D, B, A), (end_step,)]  # 1, 2 and 8 elements
    s = made(max_reuse_distance_numel=99, max_live_parameters_numel=10)
    s, _ = play(s, *step, (begin_window,), *step)
    assert s.available == (0, 1)
    s, effects = play(s, *step)
    assert of(Gather, effects) == [(3,), (0,)]
    assert play(s, (end_window,))[1] == [Release((0, 1))]


def test_an_exception_and_a_write_in_a_window_keep_nothing_that_is_stale() -> None:
    step = [(begin_step,), *calls(A, B, B, A), (end_step,)]
    s, _ = play(made(max_reuse_distance_numel=99), *step, (begin_window,), *step)
    assert updated(s, (1,))[1] == (Release((1,)),)
    s, effects = abort(s)
    assert effects == (Release((0, 1)),)
    assert s.repeats
