"""The rule of the outer update: what it may be, bound to parameters, and what it keeps.

It is asked what it needs, as the inner one is: an element, and each rank steps its parts of the
anchors; or a matrix, which is stepped by the rank of each replica that owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import require
from fzero.machine.owners import Owners, owners_of
from fzero.optim import Piece, require_real_views, sgd
from fzero.state import Local, Setup, TrainState
from fzero.state.layout import learns
from fzero.state.outer import with_outer
from fzero.transforms.pieces import pieces_of

DEFAULT_OUTER = sgd(0.7, momentum=0.9, nesterov=True)
"""The rule of the outer update: that of DiLoCo."""


def require_outer(rule: Any) -> None:
    """Raise `LayoutError` for what is no rule. What it needs is known when it is bound."""
    wanted = (
        "a rule of fzero.optim, as fzero.optim.sgd(0.7, momentum=0.9, nesterov=True), or "
        "fzero.optim.from_torch of a class or a factory"
    )
    require("local: outer", rule, lambda x: getattr(x, "counts_by_leaf", False) is True, wanted)


def bound_outer(local: Local | None, named: Mapping[str, Tensor]) -> Any:
    """Return the outer rule of these parameters, {path: tensor}; None without local updates.

    Raises `LayoutError` for one that needs all parameters at once, or does not step them all.
    """
    if local is None:
        return None
    given: Any = DEFAULT_OUTER if local.outer is None else local.outer
    rule = given.bind(named)
    require_real_views(rule, named)
    if not (rule.elementwise or rule.leafwise):
        raise LayoutError(
            f"local: outer={rule!r}, which needs all parameters at once.",
            cause="a norm over all parameters (a clip in the rule, Prodigy), or random numbers; a "
            "replica makes the outer update parameter by parameter.",
            fix="use a rule that needs an element (sgd, adamw) or a matrix (fzero.optim.muon).",
        )
    if rule.block > 1:
        raise LayoutError(
            f"local: outer={rule!r}, with a codec as state_dtype.",
            cause="the rule of the outer update keeps its states in the precision of the anchors.",
            fix="give the codec to the rule of the state, and leave it out of outer=.",
        )
    left = [path for path, p in named.items() if learns(p) and rule.group_of(path) < 0]
    if left or getattr(rule, "held", None):
        seen = f"does not step {left[0]}" if left else "has the state of a run"
        raise LayoutError(
            f"local: outer={rule!r}, which {seen}.",
            cause="an optimizer that was made for a part of the model, or that made steps.",
            fix="give fzero.optim.from_torch a class or a factory.",
        )
    return rule


def as_inner(setup: Setup) -> Setup:
    """Return the setup of a state whose optimizer is the outer rule: its parts are the anchors'."""
    options = setup.layout.options
    layout = replace(setup.layout, options=replace(options, kept=options.outer_kept))
    return replace(setup, optimizer=options.outer, layout=layout)


def outer_state(state: TrainState, fragment: int) -> TrainState:
    """Return the state whose optimizer is the outer rule, with what it keeps of a fragment."""
    held = state.outer
    assert held is not None
    return state.replace(
        optimizer=held.optimizers[fragment],
        setup=as_inner(state.setup),
        slots=with_outer(state.slots, None),
    )


def outer_owners(setup: Setup, numbers: Sequence[int]) -> Owners | None:
    """Return who owns what of the anchors of a fragment; None if each rank steps its parts."""
    owners = owners_of(as_inner(setup))
    own = None if owners is None else owners.of(numbers)
    return own if own is not None and own.positions else None


def masked(flats: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """Return the flats of a fragment in their places, and nothing in those of others."""
    own = frozenset(numbers)
    return [flat if k in own else flat.new_empty(0) for k, flat in enumerate(flats)]


def outer_pieces(setup: Setup, numbers: Sequence[int]) -> list[Piece]:
    """Return which elements of the flats of a fragment belong to which leaf."""
    own = frozenset(numbers)
    return [piece for piece in pieces_of(setup) if piece.index in own]
