"""New states that are filled from files; and the gathers that complete what each rank has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._counters import COUNT, STEP, UNSTEPPED, with_counters
from fzero.checkpoint._held import Held
from fzero.checkpoint._pieces import shards_of
from fzero.checkpoint._slots import Slot, optimizer_with, slots_across
from fzero.machine.offload import empty_where
from fzero.machine.packing import leaf_ranges, part_of, shard_of
from fzero.machine.parts import gather_parts_in_place
from fzero.state import Buffers, Placement, Progress, Setup, TrainState
from fzero.state.layout import as_real
from fzero.state.scale import from_numbers, with_slot
from fzero.state.setup import MASTERS
from fzero.state.window import CLOSED


def room(
    state: TrainState, saved: Mapping[str, Any], *, optimizer: bool = True, frozen: bool = True
) -> TrainState:
    """Return an idle state like `state` with the saved numbers, and zeros for all that is read.

    saved: the counters of a `Manifest`.
    optimizer: False: of its slots, masters alone are read; the others stay.
    frozen: False: parameters that do not learn are not read, and are copies of the state's.
    """
    made = with_room(state, optimizer=optimizer)
    if not frozen:
        for index, flat in enumerate(state.params.flats):
            if index not in state.setup.layout.trainable:
                made.params.flats[index].copy_(flat)
    return numbered(made, saved)


def numbered(state: TrainState, saved: Mapping[str, Any]) -> TrainState:
    """Return an idle state with the saved numbers, and the tensors that `state` has.

    saved: the counters of a `Manifest`.
    """
    state = state.without_gradients()
    counters = dict(saved["optimizer"])
    counters.setdefault(STEP, counters.get(COUNT, 0))  # of an optimizer that has but the count
    unstepped = saved.get(UNSTEPPED, ())
    return state.replace(
        optimizer=with_counters(state, lambda slot: slot.flat, counters, unstepped),
        gradients=Buffers(),
        window=CLOSED,
        step=torch.tensor(saved["step"], dtype=torch.int64),
        progress=Progress(),
        slots=with_slot(state.slots, from_numbers(state.scale, saved["scale"])),
    )


def zeros_where(x: Tensor) -> Tensor:
    """Return zeros like `x` that live where `x` does."""
    return empty_where(x).zero_()


def with_room(state: TrainState, *, optimizer: bool = False) -> TrainState:
    """Return a state like `state` with zeros for its parameters and masters, to be filled.

    optimizer: whether its other slots are zeros, too.
    """

    def made(slot: Slot) -> Tensor:
        is_read = optimizer or slot.name == MASTERS
        return zeros_where(slot.flat) if is_read else slot.flat

    flats = tuple(map(zeros_where, state.params.flats))  # padding stays zero
    return state.replace(
        params=Buffers(flats=flats, placement=state.params.placement),
        optimizer=optimizer_with(state, made),
    )


def read_leaves(
    held: Held, states: Sequence[TrainState], values: Callable[[int, str], Tensor | None]
) -> None:
    """Read what this process has to read of new states, one leaf at a time.

    values: (number of the leaf, params or a slot) -> the values of all its elements; None: stay.
    """
    for state, rank in zip(states, held.ranks, strict=True):
        for prefix, index, part, shard in shards_of(state, rank):
            for own in leaf_ranges(state.setup.layout, index, part):
                found = values(own.leaf, prefix.removeprefix("optimizer/"))
                if found is not None:
                    whole = as_real(found).reshape(-1)
                    own.of(shard).copy_(whole[own.start : own.stop])


def make_whole(held: Held, states: Sequence[TrainState], *, optimizer: bool = True) -> None:
    """Fill in what other ranks have read, one flat at a time. A collective.

    states: one for each of `held.ranks`, each with its own part of every flat.
    optimizer: False: of its slots, masters alone were read.
    """
    setup = states[0].setup
    params = zip(*(one.params.flats for one in states), strict=True)
    every = [(setup.params, list(flats)) for flats in params]
    slots = ((name, flats) for name, _, flats in slots_across(states))
    every += [
        (setup.optimizer_state, flats) for name, flats in slots if optimizer or name == MASTERS
    ]
    for placement, flats in every:
        make_parts_whole(held, setup, placement, flats)


def make_parts_whole(
    held: Held, setup: Setup, placement: Placement, flats: Sequence[Tensor]
) -> None:
    """Fill in what other ranks have read of a flat, given as what each rank holds. A collective."""
    if setup.part(placement, 0).count == setup.part(Placement.OVER_ALL, 0).count:
        return  # ranks have read all that they hold
    if held.is_stack:
        _share(setup, placement, flats)
    else:
        gather_parts_in_place(setup, flats, Placement.OVER_ALL, placement)


def _share(setup: Setup, placement: Placement, flats: Sequence[Tensor]) -> None:
    """Share between virtual ranks the parts of a flat that each has read."""
    parts = [setup.part(placement, rank) for rank in range(len(flats))]
    full = flats[0].new_empty(flats[0].numel() * parts[0].count)
    for rank, flat in enumerate(flats):
        own = setup.part(Placement.OVER_ALL, rank)
        shard_of(full, *own).copy_(part_of(flat, parts[rank], own))
    for part, flat in zip(parts, flats, strict=True):
        flat.copy_(shard_of(full, *part))
