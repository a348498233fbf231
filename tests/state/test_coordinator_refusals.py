"""Illegal calls of the coordinator: named, explained, and without any effect on its state."""

from __future__ import annotations

from typing import Any

import pytest

from fzero.errors import LayoutError, PhaseError
from fzero.state.coordinator import (
    begin_step,
    fetch,
    gathered,
    hold,
    let_go,
    register_external,
    release,
    require_ready,
    updated,
)
from fzero.state.residency import launch
from tests.state.coordinator_example import TIED, A, B, made

ILLEGAL = {
    "used before it was fetched": ([], (require_ready, A), "'a' is used before.*not fetched"),
    "used before it was gathered": (
        [(fetch, TIED), (gathered, (0,))],
        (require_ready, TIED),
        r"waiting for 3 \('u3'\)",
    ),
    "released before it was gathered": ([(fetch, A)], (release, A), r"waiting for 0 \('u0'\)"),
    "released twice": (
        [(fetch, A), (gathered, (0,)), (release, A)],
        (release, A),
        "'a', which is not in use; in use: nothing",
    ),
    "released unused": ([(fetch, B)], (release, A), "in use: 'b'"),
    "gathered unasked": ([], (gathered, (2,)), r"2 \('u2'\): not_available"),
    "gathered again": ([(fetch, A), (gathered, (0,))], (gathered, (0,)), "0 .*: available"),
    "gathered twice in one": ([(fetch, A)], (gathered, (0, 0)), "named twice"),
    "a step in a step": ([(begin_step,), (fetch, A)], (begin_step,), "while 'a' is in use"),
    "updated in use": ([(fetch, A)], (updated, (1, 0)), r"0 \('u0'\) changed while in use"),
    "updated while held": ([(hold, (1,))], (updated, (1,)), r"1 \('u1'\) changed while in use"),
    "let go unheld": ([(hold, (1,))], (let_go, (1, 0)), r"let_go of \(1, 0\); held are"),
}


@pytest.mark.parametrize(("before", "event", "message"), ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_calls_name_what_is_wrong_and_change_nothing(
    before: list[Any], event: Any, message: str
) -> None:
    s = made()
    for transition, *args in before:
        s, _ = transition(s, *args)
    kept = repr(s), s.residency.codes, s.active, s.held, s.trace
    with pytest.raises(PhaseError, match=message) as caught:
        event[0](s, *event[1:])
    assert "Usual cause: " in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert (repr(s), s.residency.codes, s.active, s.held, s.trace) == kept


def test_a_gather_cannot_be_started_twice() -> None:
    s, _ = fetch(made(), A)
    with pytest.raises(PhaseError, match=r"cannot start a gather 0 \('u0'\): in_flight"):
        launch(s.residency, s.units, (0,))


@pytest.mark.parametrize(
    "event",
    [(fetch, 7), (release, -1), (require_ready, 7), (register_external, 7, (0,))],
)
def test_unknown_modules_are_refused(event: Any) -> None:
    with pytest.raises(LayoutError, match=r"module (7|-1): there are 7 of them, 0 to 6"):
        event[0](made(), *event[1:])


@pytest.mark.parametrize(
    "event",
    [(gathered, (1, 5)), (hold, (5,)), (updated, (5,)), (register_external, A, (0, 5))],
)
def test_unknown_units_are_refused(event: Any) -> None:
    with pytest.raises(LayoutError, match="unit 5: there are 5 of them, 0 to 4"):
        event[0](made(), *event[1:])
