"""fzero's own transforms as records, and where each acts among the points of a step.

                a backward                 an update: decides   units      updated
    SCALE                                  3 overflow?          1 / s
    LOCAL                                                                  1 outer update
    SLOTS                                                                  2 until the update
    OBSERVE                                2 tells                         3 tells
    COMPRESS    4 what encoding loses
    CHECK       3 looks
    WEIGHTS     2 w g                      1 sum of w           2 / total
    AVERAGE                                                     3 / calls

Numbers are the order. What is nearest to the numbers that are held is first: on the way in (a
backward, `decides`) the last of the list acts first, and users' functions at `local` before all.
On the way out (`units`, `updated`) the first acts first. Clipping, which is in its place among the
transforms of users, acts at `reduced`, behind `units`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fzero.state import TrainState
from fzero.state.points import Builtin
from fzero.transforms._finite import CHECK
from fzero.transforms.compress import COMPRESS
from fzero.transforms.observe import OBSERVE
from fzero.transforms.outer import LOCAL
from fzero.transforms.points import renewed
from fzero.transforms.scaled import SCALE
from fzero.transforms.weights import AVERAGE, WEIGHTS

SLOTS = Builtin(
    name="slots",
    acts=lambda state: bool(state.slots),
    updated=lambda running, new: renewed(new, "update"),
)
"""Slots that live until an update begin anew."""

BUILTINS = (SCALE, LOCAL, SLOTS, OBSERVE, COMPRESS, CHECK, WEIGHTS, AVERAGE)
"""All of them, from the inside out."""


def on_gathered(states: Sequence[TrainState], running: Callable[[], Any]) -> Any:
    """Return what is shown each group that a pass of some states gathers; None if nobody looks.

    running: the pass, or None if it is gone: from a placeholder no way may lead to a driver.
    """
    made = (one.gathered(states, running) for one in BUILTINS if one.gathered is not None)
    return next((one for one in made if one is not None), None)


_AT: dict[str, list[tuple[Any, Any]]] = {
    point: [(one.acts, getattr(one, point)) for one in BUILTINS if getattr(one, point) is not None]
    for point in ("begins", "decides", "units", "ready", "updated")
}


def acting(state: TrainState, point: str) -> list[Any]:
    """Return what those of a state do at a point, from the inside out."""
    return [function for acts, function in _AT[point] if acts(state)]
