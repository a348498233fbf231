"""What optimizers keep of parameters with owners: saved, and read, by these, whole.

A slot with the elements of its parameter is saved as that of cut flats is. One of another shape is
a tensor of its own, [n] of its elements; its shape stands in the manifest beside its dtype. Of
replicas that train apart each has its own, replica 0 under the names of a state without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._pieces import BLOCK_NUMEL, TensorPiece, blocks, leaf_names
from fzero.checkpoint.everywhere import CheckpointError
from fzero.errors import LayoutError
from fzero.machine.owners import owners_of
from fzero.state import TrainState

Slots = dict[str, dict[str, str]]
"""{slot: {name of a parameter: its dtype; and its shape, if that is not the parameter's}}."""

_FORM = re.compile(r"(torch\.\w+) \[([0-9, ]*)\]")


class OwnedSlot(NamedTuple):
    """What is kept of one parameter by its owner."""

    slot: str
    number: int  # among parameters with owners
    name: str  # of the parameter, in a checkpoint
    values: Tensor  # as this rank has them: empty, but on the owner
    free: bool  # whether it may have any shape, and is made by the first step

    @property
    def form(self) -> str:
        """What a manifest says of it."""
        return (
            f"{self.values.dtype} {list(self.values.shape)}"
            if self.free
            else str(self.values.dtype)
        )


def owned_of(state: TrainState) -> Iterator[OwnedSlot]:
    """Yield all that is kept of parameters with owners, on every rank in the same order."""
    setup, owners = state.setup, owners_of(state.setup)
    if owners is None:
        return
    rule, layout = setup.optimizer, setup.layout
    names = leaf_names(layout)
    for slot, some in rule.owned(state.optimizer).items():
        for number, (one, values) in enumerate(zip(owners.leaves, some, strict=True)):
            free = slot in rule.made_by_steps(one.leaf)
            if free or slot in rule.kept_of(one.leaf):
                yield OwnedSlot(slot, number, names[one.index], values, free)


def owns(state: TrainState, rank: int, number: int) -> bool:
    """Return whether a rank of the mesh owns a parameter."""
    owners = owners_of(state.setup)
    return owners is not None and owners.leaves[number].owner == owners.rank_of(rank)


def owned_slots(state: TrainState) -> Slots:
    """Return what all ranks know of the slots before a step: those with a parameter's elements."""
    found: Slots = {}
    for one in owned_of(state):
        if not one.free:
            found.setdefault(one.slot, {})[one.name] = one.form
    return found


def prefix_of(state: TrainState, rank: int) -> str:
    """Return before which names a rank of the mesh saves what it owns: those of its replica."""
    replica = 0 if state.window.outer is None else rank // state.setup.layout.ranks
    return f"replica/{replica}/" if replica else ""


def read_by(like: TrainState, rank: int, origin: Mapping[str, Any]) -> str:
    """Return before which names a rank reads: those of its replica, if as many were saved.

    like: the state that is filled, as it began. origin: of the manifest.
    """
    outer, local = like.window.outer, origin.get("local")
    if outer is None or local is None:
        return ""
    same = len(local["replicas"]) == outer.mesh.replicas.size
    return prefix_of(like, rank) if same else ""


def free_slots(state: TrainState, rank: int) -> Slots:
    """Return what this rank alone knows: the forms of the slots that steps have made."""
    found: Slots = {}
    for one in owned_of(state):
        if one.free and one.values.numel() and owns(state, rank, one.number):
            found.setdefault(prefix_of(state, rank) + one.slot, {})[one.name] = one.form
    return found


def is_copy(state: TrainState, rank: int) -> bool:
    """Whether a rank of the mesh owns what a rank of the first replica owns, with equal values."""
    owners = owners_of(state.setup)
    return owners is not None and state.window.outer is None and rank >= owners.axis.size


def saved_pieces(state: TrainState, rank: int) -> list[TensorPiece]:
    """Return what a rank saves of a state, each tensor by one rank alone."""
    return [] if is_copy(state, rank) else owned_pieces(state, rank, prefix_of(state, rank))


def owned_pieces(state: TrainState, rank: int, prefix: str) -> list[TensorPiece]:
    """Return what a rank has of what owners keep, under names behind a prefix."""
    found = list[TensorPiece]()
    for one in owned_of(state):
        flat = one.values.reshape(-1)[: None if owns(state, rank, one.number) else 0]
        for start, stop in blocks(0, flat.numel(), BLOCK_NUMEL):
            name = f"{prefix}optimizer/{one.slot}/{one.name}"
            piece = flat[start:stop]
            found.append(TensorPiece(name=name, start=start, numel=flat.numel(), values=piece))
    return found


def share_with_replicas(states: Sequence[TrainState]) -> None:
    """Give the owners of other replicas what those of the first have read; all ranks are here."""
    for one, state in enumerate(states):
        owners = owners_of(state.setup)
        if owners is None or not is_copy(state, one):
            continue
        for mine, first in zip(owned_of(state), owned_of(states[owners.rank_of(one)]), strict=True):
            if owns(state, one, mine.number):
                mine.values.copy_(first.values)


def with_room_owned(
    state: TrainState, rank: int, slots: Slots, tensors: Mapping[str, Any], prefix: str
) -> TrainState:
    """Return the state with zeros for all that this rank owns, to be filled; else nothing.

    slots, tensors: of a manifest. prefix: of the names that are read; see `read_by`.

    Raises `LayoutError` for a slot that is not in the checkpoint.
    """
    rule = state.setup.optimizer
    made = {name: list(some) for name, some in rule.owned(state.optimizer).items()}
    fresh = set(rule.unstepped(state.optimizer))
    owners = owners_of(state.setup)
    for one in owned_of(state):
        assert owners is not None
        leaf, mine = owners.leaves[one.number].leaf, owns(state, rank, one.number)
        form = slots.get(prefix * one.free + one.slot, {}).get(one.name)
        if form is None and one.free and int(state.optimizer.count) and leaf.path not in fresh:
            raise LayoutError(
                f"load: there is no {one.slot} of {one.name} in the checkpoint.",
                cause="the state was made with another optimizer than the saved one.",
                fix="make the state with the optimizer that was saved. Nothing was changed.",
            )
        shape, dtype = (leaf.numel,), one.values.dtype
        if one.free:
            shape, dtype = (0,), one.values.dtype
            if form is not None:
                shape, dtype = _form_of(form, tensors, f"{prefix}optimizer/{one.slot}/{one.name}")
        device = one.values.device
        made[one.slot][one.number] = torch.zeros(
            shape if mine else (0,), dtype=dtype, device=device
        )
    optimizer = rule.with_owned(state.optimizer, {k: tuple(x) for k, x in made.items()})
    return state.replace(optimizer=optimizer)


def _form_of(
    form: str, tensors: Mapping[str, Any], name: str
) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype that a manifest says; raise if its tensor is not so long."""
    match = _FORM.fullmatch(form)
    sizes = [int(size) for size in match[2].split(",") if size.strip()] if match else []
    dtype = getattr(torch, match[1].removeprefix("torch."), None) if match else None
    numel = sum(chunk[1] for chunk in tensors.get(name, {"chunks": []})["chunks"])
    if not isinstance(dtype, torch.dtype) or prod(sizes) != numel:
        raise CheckpointError(
            f"load: {name} is {form!r:.80} in the manifest, and has {numel} elements.",
            cause="a manifest that another program wrote.",
            fix="use another copy of the checkpoint. Nothing was changed.",
        )
    return tuple(sizes), dtype
