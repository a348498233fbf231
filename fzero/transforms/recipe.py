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
    USERS       5 at `local`
    OFFLOAD                                                                4 back home

Numbers are the order. What is nearest to the numbers that are held is first: on the way in (a
backward, `decides`) the last of the list acts first, and users' functions at `local` before all.
On the way out (`units`, `updated`) the first acts first. Clipping, which is in its place among the
transforms of users, acts at `reduced`, behind `units`. AROUND and OWNERS act on the rule itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fzero.machine.offload import at_home
from fzero.machine.owners import owners_of
from fzero.state import TrainState
from fzero.state.points import At, Builtin, Mean
from fzero.state.train_state import GivenCall
from fzero.transforms.compress import COMPRESS
from fzero.transforms.local import LOCAL
from fzero.transforms.logical_rank import CARRIED
from fzero.transforms.loss_scale import SCALE
from fzero.transforms.observe import OBSERVE
from fzero.transforms.points import (
    ByPath,
    CallPart,
    at_loss,
    reduced,
    renewed,
    step_in_transforms,
    transforms_of,
)
from fzero.transforms.weights import AVERAGE, CHECK, WEIGHTS

SLOTS = Builtin(
    name="slots",
    acts=lambda state: bool(state.slots),
    updated=lambda running, new: renewed(new, "update"),
)
"""Slots that live until an update begin anew."""

USERS = Builtin(
    name="transforms",
    acts=lambda state: bool(transforms_of(state.setup, "local")),
    calls=lambda states, reducer: ByPath(states),
)
"""The functions of users at `local`: in a backward before all others."""

AT_LOSS = Builtin(
    name="transforms at `loss`",
    acts=lambda state: bool(transforms_of(state.setup, "loss")),
    loss=at_loss,
)
"""The functions of users at `loss`."""

AROUND = Builtin(
    name="transforms around the rule",
    acts=lambda state: any(transforms_of(state.setup, at) for at in ("update", "updated")),
    around=step_in_transforms,
)
"""The functions of users at `update` and `updated`."""


def _with_owners(state: TrainState, fulls: Sequence[Tensor]) -> dict[str, Any]:
    owners = owners_of(state.setup)
    if owners is None:
        return {}
    return {"owners": owners.at(fulls if state.setup.stage in (1, 2) else (), state.device)}


OWNERS = Builtin(
    name="owners",
    acts=lambda state: state.setup.optimizer.by_owners,
    rule=_with_owners,
)
"""The ranks that own whole matrices, for a rule that steps those."""

OFFLOAD = Builtin(
    name="offload",
    acts=lambda state: state.setup.is_offloaded,
    rule=lambda state, fulls: {"device": state.device},
    updated=lambda running, new: new if running.general else at_home(new),
)
"""What lives elsewhere goes back there after an update, behind all others."""

BUILTINS = (
    SCALE,
    LOCAL,
    SLOTS,
    OBSERVE,
    COMPRESS,
    CHECK,
    WEIGHTS,
    AVERAGE,
    CARRIED,
    USERS,
    AT_LOSS,
    AROUND,
    OWNERS,
    OFFLOAD,
)
"""All of them, from the inside out."""


_AT = (
    *("called", "gathered", "begins", "leaves", "loss", "factor", "forgets"),
    *("decides", "units", "mean", "ready", "rule", "around", "updated"),
)


def _recipe(state: TrainState) -> SimpleNamespace:
    """Return what acts on a state at each point, in order: of a plain state nothing does.

    It is made once for a setup and the names of the slots, for nothing else says what acts. `calls`
    has the transforms that act in backwards; `facts` for each place lines of text, or functions of
    the state that give them; all others have functions.
    """
    acts = [one for one in BUILTINS if one.acts is not None and one.acts(state)]
    made: dict[str, Any] = {
        point: tuple(getattr(one, point) for one in acts if getattr(one, point) is not None)
        for point in _AT
    }
    made["decides"] = made["decides"][::-1]
    if made["units"] or transforms_of(state.setup, "reduced"):
        made["units"] += (reduced,)
    some: list[tuple[Builtin, Any]] = [(x, x.facts) for x in BUILTINS if x.facts is not None]
    places: tuple[At, ...] = ("pass", "call", "update")
    facts = {at: [of if one in acts else of(state, at) for one, of in some] for at in places}
    calls = tuple(one for one in acts if one.calls is not None)
    return SimpleNamespace(**made, calls=calls, facts=facts)


def recipe_of(state: TrainState) -> SimpleNamespace:
    """Return what acts on a state."""
    known, names = state.setup.recipes, tuple(state.slots)
    found = known.get(names)
    if found is None:
        found = known[names] = _recipe(state)
    return found


def parts_in(
    states: Sequence[TrainState], reducer: Any, before: Mapping[str, CallPart]
) -> dict[str, CallPart]:
    """Return what acts in the backwards of some states, from the outside in, by its name.

    before: what acted in the last one, and goes on. reducer: its; None under torch.func.
    """
    acts = {one.name: one for state in states for one in recipe_of(state).calls}
    parts: dict[str, CallPart] = {}
    for one in reversed(BUILTINS) if acts else ():
        if one.name in acts:
            part = before.get(one.name) or acts[one.name].calls(states, reducer)
            if part is not None:
                parts[one.name] = part
    return parts


# Before a backward, and where ranks agree.


def called(state: TrainState, call: GivenCall) -> TrainState:
    """Return a state to which a call brings gradients; raise if they do not go with its others."""
    some = recipe_of(state).called if call.weight is None else _CALLED  # a first one may act now
    for one in some:
        state = one(state, call)
    return state


_CALLED = tuple(one.called for one in BUILTINS if one.called is not None)


def begun(state: TrainState) -> TrainState:
    """Return a state of which a loss is made, or an update begins."""
    for begins in recipe_of(state).begins:
        state = begins(state)
    return state


def forgotten(state: TrainState) -> TrainState:
    """Return a state after all ranks have thrown its gradients away."""
    for forgets in recipe_of(state).forgets:
        state = forgets(state)
    return state


def facts(state: TrainState, at: At) -> list[str]:
    """Return what ranks must have in common of a state, a line each."""
    lines: list[str] = []
    for of in recipe_of(state).facts[at]:
        made: Any = of if isinstance(of, list) else of(state, at)
        lines += made
    return lines


def loss_learned(states: Sequence[TrainState], loss: Tensor) -> Tensor:
    """Return the loss that is differentiated in the place of one of these states."""
    for state in states:
        if state.setup.layout.trainable:
            for learned in recipe_of(state).loss:
                loss = learned(state, loss)
    return loss


def mean_of(state: TrainState) -> Mean:
    """Return how an update makes means of what a state holds. A collective with weights."""
    for mean in recipe_of(state).mean:
        return mean(state)
    return Mean()


def factor_of(state: TrainState) -> Tensor | None:
    """Return what losses of a state, and so its gradients, are multiplied by: []; None for 1."""
    for factor in recipe_of(state).factor:
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
    for i, share in enumerate(one.setup.share_of_mesh for one in states):
        if share != 1.0:  # in fp64, for 1/3 in fp32 is not 1/3 of a gradient in fp64
            own = factors[i]
            factors[i] = share * (
                torch.ones((), dtype=torch.float64) if own is None else own.double()
            )
    return by, factors


def times_factor(state: TrainState, flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return gradients that no loss has brought, times the factor that those of a loss have.

    In fp32 if they are of 16 bits, which may not hold them with it.
    """
    by = factor_of(state)
    if by is None:
        return flats
    wide = [flat.to(torch.promote_types(flat.dtype, torch.float32)) for flat in flats]
    return [flat * by.to(flat.dtype) for flat in wide]
