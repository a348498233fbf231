"""New states that are filled from files; and the gathers that complete what each rank has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint._held import Held
from fzero.checkpoint._manifest import COUNT, STEP
from fzero.checkpoint._slots import Role, with_values
from fzero.collectives import gather_parts_in_place
from fzero.homes import empty_where
from fzero.packing import part_of, shard_of
from fzero.state import NAMESPACE, Buffers, Placement, Progress, Setup, TrainState
from fzero.state.scale import from_numbers
from fzero.state.window import CLOSED


def room(state: TrainState, roles: Sequence[Role], saved: Mapping[str, Any]) -> TrainState:
    """Return an idle state like `state` with the saved numbers, and zeros for all that is read.

    saved: the counters of a `Manifest`.
    """
    counters = _of("optimizer/", saved)
    counters.setdefault(STEP, counters.get(COUNT, 0))  # of an optimizer that has but the count
    leaves, treespec = optree.tree_flatten(state.optimizer, namespace=NAMESPACE)
    slots = (
        empty_where(leaf).zero_()
        for role, leaf in zip(roles, leaves, strict=True)
        if role.position is not None and leaf.numel()
    )
    placed = with_values(roles, leaves, slots, counters)
    flats = tuple(empty_where(flat).zero_() for flat in state.params.flats)  # padding stays zero
    return state.replace(
        params=Buffers(flats=flats, placement=state.params.placement),
        gradients=Buffers(),
        optimizer=optree.tree_unflatten(treespec, placed),
        window=CLOSED,
        step=torch.tensor(saved["step"], dtype=torch.int64),
        progress=Progress(),
        scale=from_numbers(state.scale, _of("scale/", saved)),
    )


def make_whole(held: Held, states: Sequence[TrainState], roles: Sequence[Sequence[Role]]) -> None:
    """Fill in what other ranks have read, one flat at a time. A collective.

    states: one for each of `held.ranks`, each with its own part of every flat.
    """
    each = [_placed(one, some) for one, some in zip(states, roles, strict=True)]
    setup = states[0].setup
    for placed in zip(*each, strict=True):
        placement, flats = placed[0][0], [flat for _, flat in placed]
        if held.is_stack:
            _share(setup, placement, flats)
        else:
            gather_parts_in_place(setup, flats, Placement.OVER_ALL, placement)


def _of(prefix: str, counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the counters whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): x for name, x in counters.items() if name.startswith(prefix)}


def _placed(state: TrainState, roles: Sequence[Role]) -> list[tuple[Placement, Tensor]]:
    """Return the flats of which ranks hold more than they read, and how they are placed."""
    setup = state.setup
    leaves = optree.tree_leaves(state.optimizer, namespace=NAMESPACE)
    slots = [x for x, role in zip(leaves, roles, strict=True) if role.position is not None]
    found = [(setup.params, flat) for flat in state.params.flats]
    found += [(setup.optimizer_state, flat) for flat in slots if flat.numel()]
    own = setup.part(Placement.OVER_ALL, 0).count
    return [(held, flat) for held, flat in found if setup.part(held, 0).count < own]


def _share(setup: Setup, placement: Placement, flats: Sequence[Tensor]) -> None:
    """Give each virtual rank what the others have read of a flat."""
    parts = [setup.part(placement, rank) for rank in range(len(flats))]
    full = flats[0].new_empty(flats[0].numel() * parts[0].count)
    for rank, flat in enumerate(flats):
        own = setup.part(Placement.OVER_ALL, rank)
        shard_of(full, *own).copy_(part_of(flat, parts[rank], own))
    for part, flat in zip(parts, flats, strict=True):
        flat.copy_(shard_of(full, *part))
