"""What a torch.optim optimizer keeps for flat shards: its record, made before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.optim._bind import Bound
from fzero.optim._masters import Place, make_masters
from fzero.optim._piece import Piece
from fzero.optim._precision import Precision
from fzero.optim._step import Unit
from fzero.optim._trial import Kept
from fzero.state._record import record


@record
class TorchState:
    """What a torch.optim optimizer keeps for this rank's shards, parallel to the list of flats."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates made
    slots: dict[str, tuple[Tensor, ...]]  # by name; of a flat that has no such slot, empty
    counters: dict[str, tuple[Tensor, ...]]  # by name, one for each param group
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit flats; of others, empty


def units_of(bound: Bound, pieces: Sequence[Piece]) -> list[Unit]:
    """Return what the optimizer steps as one parameter each: flats, or the leaves in them."""
    units: list[Unit] = []
    seen: set[int] = set()
    for index, leaf, start, stop, first in pieces:
        kept = bound.kept_for(leaf)
        if kept is None or start >= stop:
            continue
        group = bound.group_at[leaf.path]
        if not bound.elementwise[group]:
            if first < leaf.numel:  # else it is padding behind the leaf
                units.append(Unit(index, group, (start, start + leaf.numel), leaf.shape, kept))
        elif index not in seen:
            units.append(Unit(index, group, None, (), kept))
        seen.add(index)
    return units


def new_state(
    bound: Bound, params: Sequence[Tensor], pieces: Sequence[Piece], place: Place
) -> TorchState:
    """Return the state for flats [l] before the first step; `place` takes each tensor home."""
    precision = bound.precision
    of_flat = {index: bound.kept_for(leaf) for index, leaf, *_ in pieces}  # alike in a flat
    flats = [(p, of_flat[i]) for i, p in enumerate(params)]
    wanted = [precision.master_weights and kept is not None for _, kept in flats]
    every = bound.kept.values()
    slots = {
        name: tuple(place(_slot(name, p, kept, precision)) for p, kept in flats)
        for name in sorted({name for kept in every for name in (*kept.slots, *kept.odd)})
    }
    begin = [bound.begin_of(group) for group in range(len(bound.shared))]
    counters = {  # 0 for a group that learns nothing, or has none
        name: tuple(some[name].clone() if name in some else torch.zeros(()) for some in begin)
        for name in sorted({name for some in begin for name in some})
    }
    masters = make_masters(params, wanted, place)
    count = torch.zeros((), dtype=torch.int64)
    return TorchState(count=count, slots=slots, counters=counters, masters=masters)


def _slot(name: str, p: Tensor, kept: Kept | None, precision: Precision) -> Tensor:
    if kept is None or name not in kept.slots:
        return p.new_empty(0)  # also of another shape: such a slot is made by the first step
    fill = kept.slots[name]
    as_stepped = fill.dtype == kept.dtype
    dtype = precision.kept(p.dtype) if as_stepped else fill.dtype
    return torch.full_like(p, fill.item(), dtype=dtype, requires_grad=False)
