"""States that are to be filled from files: made empty before, and made whole after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint._held import Held
from fzero.checkpoint._manifest import COUNT, STEP
from fzero.checkpoint._slots import Role, with_values
from fzero.collectives import start_gather_in_place
from fzero.homes import empty_where
from fzero.partition import shard_of
from fzero.state import NAMESPACE, Buffers, Placement, Progress, TrainState
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
    """Fill in what other ranks have read of replicated flats, one flat at a time. A collective.

    states: one for each of `held.ranks`, each with its own shard of every flat.
    """
    each = [_replicated(one, some) for one, some in zip(states, roles, strict=True)]
    for flats in zip(*each, strict=True):
        if held.is_stack:
            parts = [shard_of(flat, len(flats), rank) for rank, flat in enumerate(flats)]
            full = torch.cat(parts)
            for flat in flats:
                flat.copy_(full)
        else:
            start_gather_in_place(flats, held.axis).wait()


def _of(prefix: str, counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the counters whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): x for name, x in counters.items() if name.startswith(prefix)}


def _replicated(state: TrainState, roles: Sequence[Role]) -> list[Tensor]:
    """Return the flats [W l] that every rank holds whole."""
    setup, found = state.setup, []
    if setup.params is not Placement.SHARDED:
        found += state.params.flats
    if setup.optimizer_state is not Placement.SHARDED:
        leaves = optree.tree_leaves(state.optimizer, namespace=NAMESPACE)
        pairs = zip(roles, leaves, strict=True)
        found += [leaf for role, leaf in pairs if role.position is not None and leaf.numel()]
    return found
