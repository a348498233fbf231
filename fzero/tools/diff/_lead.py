"""The gradients and results of an update of run b, from which run a continues.

Run a's optimizer gets the gradients of b. An update then differs by the rounding of the optimizer
alone, also where Adam divides by nearly zero, or Lion takes the sign of it. After the update a
has the values of b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.elements import RuleSlot, counters_of, slots_of, unstepped_of, with_counters
from fzero.errors import LayoutError
from fzero.machine.owners import owners_of
from fzero.machine.parts import cut
from fzero.state import Buffers, TrainState
from fzero.state.setup import MASTERS
from fzero.tools.compare import CORNERS, DISTURBANCE, perturbed, signs_like
from fzero.tools.diff._values import Values, disturbed, flat_of, with_whole
from fzero.transforms.pieces import pieces_of

Flats = Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lead:
    """The full values of one update of run b."""

    gradients: Mapping[str, Tensor]  # that the optimizer was given, flat
    after: Values

    def disturbed(self, size: float, seed: int) -> Lead:
        """Return the lead with perturbed values after the update."""
        return replace(self, after=disturbed(self.after, size, seed))

    def given(self, state: TrainState, rank: int, ready: Any) -> Any:
        """Return `ready`, the state before this rank's update, with the gradients of b."""
        setup = state.setup
        scale = 1.0 if ready.grad_scale is None else ready.grad_scale.double().cpu()

        def of(path: str, old: Tensor) -> Tensor:
            found = self.gradients.get(path)
            return old if found is None else found * scale

        flats = [
            flat_of(setup, index, setup.gradients, rank, of, flat)
            for index, flat in zip(setup.layout.trainable, ready.gradients.flats, strict=True)
        ]
        held = Buffers(flats=tuple(flats), placement=ready.gradients.placement)
        return ready._replace(gradients=held)

    def onward(self, state: TrainState, rank: int) -> TrainState:
        """Return the state from which this rank continues."""
        return with_whole(state, rank, self.after)


class Corner(NamedTuple):
    """The result of this rank's update from perturbed gradients and slots."""

    moved: list[Tensor]  # p' - p of each trainable group
    slots: dict[tuple[str, int], Tensor]  # (name, group); of masters, what is added


def corners(state: TrainState, gradients: Flats, unit: float) -> list[Corner]:
    """Return this rank's updates from gradients and slots changed by 4 u of themselves.

    Not a collective: the optimizer runs on the local shards. gradients: unscaled.
    """
    setup = state.setup
    if owners_of(setup) is not None:
        raise LayoutError(
            f"diff: {setup.optimizer!r} updates whole parameters, each on the rank that owns it.",
            cause="a matrix rule (Muon, LAMB, Adafactor), whose states lie with the owners.",
            fix="use an elementwise optimizer for the comparison, such as fzero.optim.adamw.",
        )
    fulls = [state.params.flats[i] for i in setup.layout.trainable]
    shards = [cut(setup, full, setup.params, setup.optimizer_state) for full in fulls]
    source = torch.Generator().manual_seed(0)
    signs = [signs_like(x, source) for x in gradients]
    place = {index: k for k, index in enumerate(setup.layout.trainable)}
    options: dict[str, Any] = {"differentiable": False, "owned": False}
    if not setup.offload.neutral:
        options["device"] = state.device
    before = _slots(state, state.optimizer)
    found = []
    for up, of_slots in CORNERS:
        size = DISTURBANCE * unit

        def slot(one: RuleSlot, size: float = size * of_slots) -> Tensor:
            if one.name == MASTERS:
                return one.flat.clone()
            return perturbed(one.numbers, size, signs[place[one.group]])

        optimizer = with_counters(state, slot, counters_of(state), unstepped_of(state))
        given = [perturbed(g, up * size, sign) for g, sign in zip(gradients, signs, strict=True)]
        new, after = setup.optimizer.advance(shards, given, optimizer, pieces_of(setup), **options)
        moved = [y.double() - x.double() for x, y in zip(shards, new, strict=True)]
        slots = {
            key: flat - before[key] if key[0] == MASTERS else flat
            for key, flat in _slots(state, after).items()
        }
        found.append(Corner(moved, slots))
    return found


def _slots(state: TrainState, optimizer: Any) -> dict[tuple[str, int], Tensor]:
    found = slots_of(state.replace(optimizer=optimizer))
    return {(slot.name, slot.group): slot.numbers.double() for slot in found}
