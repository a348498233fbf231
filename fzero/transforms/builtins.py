"""fzero's own transforms as records, and where each acts among the points of a step.

                a loss, a backward         an update: decides   units      updated
    SCALE       1 s L                      3 overflow?          1 / s
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

import torch
from torch import Tensor

from fzero.state import Setup, TrainState
from fzero.state.call import GivenCall
from fzero.state.points import At, Builtin
from fzero.transforms._finite import CHECK
from fzero.transforms.carried import CARRIED
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

BUILTINS = (SCALE, LOCAL, SLOTS, OBSERVE, COMPRESS, CHECK, WEIGHTS, AVERAGE, CARRIED)
"""All of them, from the inside out."""


def on_gathered(states: Sequence[TrainState], running: Callable[[], Any]) -> Any:
    """Return what is shown each group that a pass of some states gathers; None if nobody looks.

    running: the pass, or None if it is gone: from a placeholder no way may lead to a driver.
    """
    made = (one.gathered(states, running) for one in BUILTINS if one.gathered is not None)
    return next((one for one in made if one is not None), None)


_AT: dict[str, list[tuple[Any, Any]]] = {
    point: [(one.acts, getattr(one, point)) for one in BUILTINS if getattr(one, point) is not None]
    for point in ("begins", "factor", "forgets", "decides", "units", "ready", "updated")
}


def acting(state: TrainState, point: str) -> list[Any]:
    """Return what those of a state do at a point, from the inside out."""
    return [function for acts, function in _AT[point] if acts(state)]


# Before a backward, and where ranks agree.


def called(state: TrainState, call: GivenCall) -> TrainState:
    """Return a state to which a call brings gradients; raise if they do not go with its others."""
    for one in BUILTINS:
        if one.called is not None:
            state = one.called(state, call)
    return state


def begun(state: TrainState) -> TrainState:
    """Return a state of which a loss is made, or an update begins."""
    for begins in acting(state, "begins"):
        state = begins(state)
    return state


def forgotten(state: TrainState) -> TrainState:
    """Return a state after all ranks have thrown its gradients away."""
    for forgets in acting(state, "forgets"):
        state = forgets(state)
    return state


def facts(state: TrainState, at: At) -> list[str]:
    """Return what ranks must have in common of a state, a line each."""
    return [line for one in BUILTINS if one.facts is not None for line in one.facts(state, at)]


def factor_of(state: TrainState) -> Tensor | None:
    """Return what losses of a state, and so its gradients, are multiplied by: []; None for 1."""
    for factor in acting(state, "factor"):
        if (by := factor(state)) is not None:
            return by
    return None


def factors_of(states: Sequence[TrainState]) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return what to multiply a loss by, and then the gradient of each state by; None for 1.

    A loss has one factor, that of the first state that has one. Gradients of another state are
    then multiplied by its own factor over that one. Those of a state on a part of a mesh are
    multiplied by its share as well.
    """
    factors = [factor_of(state) for state in states]
    by = next((x for x in factors if x is not None), None)
    if by is not None:
        ones = [by.new_ones(()) if x is None else x for x in factors]
        factors = [None if x is by else x / by for x in ones]
    return by, [_with_share(x, one.setup) for x, one in zip(factors, states, strict=True)]


def _with_share(factor: Tensor | None, setup: Setup) -> Tensor | None:
    if (share := setup.share_of_mesh) == 1.0:
        return factor
    one = torch.ones((), dtype=torch.float64) if factor is None else factor.double()
    return one * share  # 1/3 in fp32 is not 1/3 of a gradient in fp64


def times_factor(state: TrainState, flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return gradients that no loss has brought, times the factor that those of a loss have.

    In fp32 if they are of 16 bits, which may not hold them with it.
    """
    by = factor_of(state)
    if by is None:
        return flats
    wide = [flat.to(torch.promote_types(flat.dtype, torch.float32)) for flat in flats]
    return [flat * by.to(flat.dtype) for flat in wide]
