"""The gathers that complete what each rank has read; and states whose leaves are read whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._held import Held
from fzero.checkpoint._pieces import put_common
from fzero.checkpoint._room import NewState, finished_room, zeros_where
from fzero.errors import LayoutError, explain
from fzero.machine.offload import empty_where
from fzero.machine.packing import leaf_ranges, part_of, shard_of
from fzero.machine.parts import gather_parts_in_place
from fzero.ranks.mesh import axis_index
from fzero.state import Placement, Setup, TrainState
from fzero.state.entry import Entry
from fzero.transforms.kept import entries_of, is_slot, shared_of, trains_apart, with_entries
from fzero.transforms.simulate import simulate

Choice = Callable[[Entry], bool]


def completed(held: Held, rooms: Sequence[NewState]) -> list[TrainState]:
    """Return the states that were read, made whole. A collective."""
    states = [room.state for room in rooms]
    begins = {key for room in rooms for key in room.begins}
    make_whole(held, states, lambda one: one.key not in begins)
    return (
        [finished_room(rooms[0])]
        if not held.is_stack
        else on_ranks(len(rooms), lambda rank: finished_room(rooms[rank]))
    )


def on_ranks(size: int, do: Callable[[int], Any]) -> list[Any]:
    """Return what `do(rank)` returns on each of so many virtual ranks."""
    found: list[Any] = [None] * size

    def body() -> None:
        found[axis_index()] = do(axis_index())

    simulate(body, world_size=size)()
    return found


def make_whole(held: Held, states: Sequence[TrainState], reads: Choice) -> None:
    """Fill in what other ranks have read, one flat at a time: of each replica by itself.

    states: one for each of `held.ranks`, each with its own part of every flat. reads: which entries
    were read. A collective.
    """
    setup = states[0].setup
    ranks = setup.axis.size if held.is_stack else 1
    for begin in range(0, len(states), ranks):
        some = states[begin : begin + ranks]
        for same in zip(*(_flats_of(one, rank) for rank, one in enumerate(some)), strict=True):
            if reads(same[0]):
                for index in same[0].values:
                    flats = [one.values[index] for one in same]
                    _make_flat_whole(held, setup, same[0].placement, flats)


def _flats_of(state: TrainState, rank: int) -> list[Entry]:
    every = entries_of(state, rank)
    every += shared_of(state, rank) if trains_apart(state) else []
    return [one for one in every if one.per_leaf and one.placement is not Placement.PARTIAL]


def _make_flat_whole(
    held: Held, setup: Setup, placement: Placement, flats: Sequence[Tensor]
) -> None:
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


# Leaf by leaf.


def with_room(state: TrainState, rank: int, reads: Choice, *, copies: bool = False) -> TrainState:
    """Return a state like `state` with zeros, or copies, of the entries that are read."""
    some = [one for one in entries_of(state, rank) if one.per_leaf and reads(one)]
    return with_entries(
        state,
        [
            Entry(
                name=one.name,
                form=one.form,
                # Padding stays zero.
                values={
                    i: empty_where(x).copy_(x)
                    if copies
                    else one.codecs[i].fill(zeros_where(x))
                    if i in one.codecs
                    else zeros_where(x)
                    for i, x in one.values.items()
                },
            )
            for one in some
        ],
    )


def read_leaves(
    held: Held,
    states: Sequence[TrainState],
    reads: Choice,
    values: Callable[[int, str], Tensor | None],
) -> None:
    """Read what this process has to read of new states, one leaf at a time.

    values: (number of the leaf, name of the entry) -> the values of all its elements; of another
        shape with as many dims, of which what is in both is set; or None, and all stays.
    """
    for state, rank in zip(states, held.ranks, strict=True):
        setup = state.setup
        part = setup.part(Placement.OVER_ALL, rank)
        for one in entries_of(state, rank):
            for index, flat in one.values.items() if one.per_leaf and reads(one) else ():
                shard = part_of(flat, setup.part(one.placement, rank), part)
                codec = one.codecs.get(index)
                layout = setup.layout if codec is None else codec.layout(setup.layout)
                for own in leaf_ranges(layout, index, part):
                    leaf, found = setup.layout.leaves[own.leaf], values(own.leaf, one.name)
                    if found is None:
                        continue
                    other, target = tuple(found.shape), own.of(shard)
                    if len(other) == len(leaf.shape) and other != leaf.shape:
                        put_common(leaf, found, own, target, codec)
                        continue
                    whole = leaf.stored(found)
                    whole = whole if codec is None else codec.row_of(whole.float())
                    target.copy_(whole[own.start : own.stop])


def require_equal(where: object, names: Sequence[str], values: Callable[[str], Tensor]) -> None:
    """Raise `LayoutError` where files have several values for one tied parameter."""
    for name in names[1:]:
        if not torch.equal(values(names[0]), values(name)):
            raise LayoutError(
                f"{where} has one value for {names[0]} and another for {name}.",
                cause="a model that ties them, and a checkpoint of one that did not.",
                fix="load it into a model that does not tie them. Nothing was changed.",
            )


def are_alike(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return whether values of a file may be converted: floating ones, or complex ones."""
    both = saved, own
    alike = all(x.is_floating_point for x in both) or all(x.is_complex for x in both)
    return alike or saved is own


def begun_slots(held: Held, states: Sequence[TrainState], where: str) -> list[TrainState]:
    """Return states in which all begins anew that files of another format have no place for.

    A collective, where there is such a thing. where: the call and what was read, for a warning.
    """
    warn_of_left_out(states[0], held.ranks[0], where)

    def one(k: int) -> TrainState:
        like, own = held.states[k], held.ranks[k]
        begins = {x.key for x in entries_of(states[k], own) if is_slot(x)}
        return finished_room(NewState(like=like, state=states[k], own=own, begins=begins))

    return on_ranks(len(states), one) if held.is_stack else [one(0)]


def warn_of_left_out(state: TrainState, rank: int, where: str = "save_universal: it") -> None:
    """Warn of what a state keeps beside parameters and what is of its optimizer."""
    lost = [one.name for one in entries_of(state, rank) if is_slot(one) and not one.form.optional]
    if lost:
        text = explain(
            f"{where} has no place for {', '.join(lost)}, which the state keeps.",
            cause="the format of another library, which has parameters and optimizers alone.",
            fix="nothing, if they may begin as in a new state; fzero.checkpoint.save has them.",
        )
        warnings.warn(text, UserWarning, stacklevel=3)
