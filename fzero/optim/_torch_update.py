"""One update of a torch.optim optimizer: even flats where they are, whole parameters by owners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fzero.machine.owners import Owners
from fzero.optim._bind import Bound
from fzero.optim._owned import owned_pieces, step_owned, subset
from fzero.optim._piece import Piece
from fzero.optim._rules import Scaled
from fzero.optim._step import Portions
from fzero.optim._stream import Flats, counted, step_flats
from fzero.optim._torch_state import TorchState, turn_of, units_of


def updated(
    bound: Bound,
    flats: Flats,
    state: TorchState,
    pieces: Sequence[Piece],
    *,
    owners: Owners | None,
    unused: frozenset[str],
    device: torch.device | None,
    scaled: Scaled,
) -> TorchState:
    """Step the flats in place, and what the state has; return the state after it.

    A portion has flats of this rank, or whole parameters that it owns. These are numbered behind
    the flats.
    """
    whole = frozenset[int]() if owners is None else owners.positions
    even = [i for i in range(len(flats.params)) if i not in whole]
    own = [] if owners is None else owned_pieces(owners, len(flats.params))
    turn = turn_of(bound, state, unused)
    units = units_of(bound, [*(p for p in pieces if p.index not in whole), *own], turn.now)
    steps = Portions(bound, units, state.counters, turn, flats=len(flats.params))
    step = partial(
        step_flats,
        run=steps,
        precision=bound.precision,
        device=device,
        scaled=scaled,
        owned=True,  # they are, or copies
        pieces=[*pieces, *own],
        count=state.count,
    )
    made, owned = step(subset(flats, even)), state.owned
    if owners is not None:
        owned = step_owned(step, owners, flats, owned)
    slots = {name: list(some) for name, some in state.slots.items()}
    for name, some in made.items():
        for i, x in zip(even, some, strict=True):
            slots[name][i] = x
    return TorchState(
        count=counted(state.count, scaled.found_inf),
        slots={name: tuple(some) for name, some in slots.items()},
        counters=dict(steps.counters),
        masters=state.masters,
        owned=owned,
        apart=turn.now.apart,
        unstepped=turn.unstepped,
    )
