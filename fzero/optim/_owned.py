"""What a torch.optim rule keeps of whole parameters, and their step: on the rank that owns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fzero.machine.owners import Owners, Wholes
from fzero.optim._bind import Bound
from fzero.optim._piece import Piece
from fzero.optim._stream import Flats, Slots, written_back
from fzero.optim.masters import Place, work_tensors

Owned = dict[str, tuple[Tensor, ...]]
"""{name: what a rank keeps of each parameter with an owner; empty on those that do not own it}."""


def owned_slots(bound: Bound, owners: Owners, params: Sequence[Tensor], place: Place) -> Owned:
    """Return the slots before the first step; one of another shape is made by it."""
    kept = [bound.kept_for(one.leaf) if owners.has(one) else None for one in owners.leaves]
    names = sorted({name for x in kept if x is not None for name in (*x.slots, *x.odd)})
    mine = set(owners.mine)

    def made(name: str, number: int) -> Tensor:
        one, mine_of = owners.leaves[number], kept[number]
        flat = params[one.position]
        if mine_of is None or name not in mine_of.slots:
            return flat.new_empty(0)
        fill = mine_of.slots[name]
        as_stepped = fill.dtype == mine_of.dtype
        dtype = bound.precision.kept(flat.dtype) if as_stepped else fill.dtype
        size = one.leaf.numel if number in mine else 0
        return place(torch.full((size,), fill.item(), dtype=dtype, device=flat.device))

    return {name: tuple(made(name, k) for k in range(len(kept))) for name in names}


def owned_pieces(owners: Owners, first: int) -> list[Piece]:
    """Return a piece for each parameter that this rank owns, numbered from `first` on."""
    found = ((k, owners.leaves[k].leaf) for k in owners.mine)
    return [Piece(first + k, leaf, 0, leaf.numel) for k, leaf in found]


def step_owned(step: Callable[[Flats], Slots], owners: Owners, flats: Flats, owned: Owned) -> Owned:
    """Step the parameters that have owners, numbered behind the flats; return the new slots.

    step: steps flats in place. flats: this rank's shards, which get the new parameters.
    """
    made = {name: list(some) for name, some in owned.items()}
    work, first = work_tensors(flats.params, flats.masters), len(flats.params)

    def compute(mine: list[int], wholes: Wholes) -> Mapping[int, Tensor]:
        if not mine:
            return {}
        params, grads = ([wholes[k][j] for k in mine] for j in (0, 1))
        slots = {name: [some[k] for k in mine] for name, some in made.items()}
        none = [p.new_empty(0) for p in params]
        after = step(Flats(params, grads, none, slots, [first + k for k in mine]))
        for name, some in after.items():
            for k, x in zip(mine, some, strict=True):
                made[name][k] = x
        return dict(zip(mine, params, strict=True))

    owners.run([work, flats.grads], compute, work)
    for position in owners.positions:
        written_back(flats, position, work[position])
    mine = set(owners.mine)
    return {
        name: tuple(x if k in mine else x.new_empty(0) for k, x in enumerate(some))
        for name, some in made.items()
    }


def subset(flats: Flats, indices: Sequence[int]) -> Flats:
    """Return some of the flats, by their numbers."""

    def own(some: Sequence[Tensor]) -> list[Tensor]:
        return [some[i] for i in indices]

    slots = {name: own(some) for name, some in flats.slots.items()}
    return Flats(own(flats.params), own(flats.grads), own(flats.masters), slots, indices)
