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
    counters: dict[str, tuple[Tensor, ...]]  # by name, one for each param group (see `init`)
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit flats; of others, empty


def units_of(
    bound: Bound, precision: Precision, params: Sequence[Tensor], pieces: Sequence[Piece]
) -> list[Unit] | None:
    """Return what the optimizer steps as one parameter each: flats, or the leaves in them.

    None if it must have whole leaves, and there are parts of some.
    """
    units: list[Unit] = []
    seen: set[int] = set()
    for index, leaf, start, stop, _ in pieces:
        group = bound.group_at.get(leaf.path, -1)
        if group < 0 or start >= stop or (bound.elementwise and index in seen):
            continue
        dtype = precision.stepped(params[index].dtype)
        if bound.elementwise:
            kept = bound.kept[group, dtype, 1]
            units.append(Unit(index, group, None, (), kept, group))
        elif leaf.numel:
            kept = bound.kept[group, dtype, max(len(leaf.shape), 1)]
            if stop - start < leaf.numel or (kept.odd and index in seen):
                return None
            span = (start, start + leaf.numel)
            units.append(Unit(index, group, span, leaf.shape, kept, len(units)))
        seen.add(index)
    return units


def new_state(
    bound: Bound,
    precision: Precision,
    params: Sequence[Tensor],
    units: Sequence[Unit],
    pieces: Sequence[Piece],
    place: Place,
) -> TorchState:
    """Return the state for flats [l] before the first step; `place` takes each tensor home."""
    groups = _groups(bound, len(params), pieces)
    masters = make_masters(params, [precision.master_weights and g != -1 for g in groups], place)
    of_flat: list[list[Kept]] = [[] for _ in params]
    for unit in units:
        of_flat[unit.index].append(unit.kept)
    for found, g, p in zip(of_flat, groups, params, strict=True):
        if not found and g != -1:  # of padding alone: as the same flat of the other ranks
            dtype = precision.stepped(p.dtype)
            found += [k for (n, *_), k in bound.kept.items() if g in (n, None) and k.dtype == dtype]
    every = bound.kept.values()
    slots = {
        name: tuple(
            place(_slot(name, p, found, precision))
            for p, found in zip(params, of_flat, strict=True)
        )
        for name in sorted({name for kept in every for name in (*kept.slots, *kept.odd)})
    }
    owners: Sequence[Kept | None] = [unit.kept for unit in units]
    if bound.elementwise:
        some = {group: kept for (group, *_), kept in bound.kept.items()}
        owners = [some.get(g) for g in range(bound.groups)]
    counters = {
        name: tuple(_counter(name, kept) for kept in owners)
        for name in sorted({name for kept in every for name in kept.counters})
    }
    count = torch.zeros((), dtype=torch.int64)
    return TorchState(count=count, slots=slots, counters=counters, masters=masters)


def _groups(bound: Bound, flats: int, pieces: Sequence[Piece]) -> list[int | None]:
    """The param group of each flat; None if no piece tells."""
    groups: list[int | None] = [None] * flats
    for piece in pieces:
        if groups[piece.index] is None:
            groups[piece.index] = bound.group_at.get(piece.leaf.path, -1)
    return groups


def _slot(name: str, p: Tensor, found: Sequence[Kept], precision: Precision) -> Tensor:
    for kept in found:
        if name in kept.slots:
            fill = kept.slots[name]
            as_stepped = fill.dtype == kept.dtype
            dtype = precision.kept(p.dtype) if as_stepped else fill.dtype
            return torch.full_like(p, fill.item(), dtype=dtype, requires_grad=False)
    return p.new_empty(0)  # also of another shape: such a slot is made by the first step


def _counter(name: str, kept: Kept | None) -> Tensor:
    """A counter before the first step; 0 for a group that learns nothing, or has none."""
    return kept.counters[name].clone() if kept and name in kept.counters else torch.zeros(())
