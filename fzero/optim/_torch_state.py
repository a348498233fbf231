"""`TorchState`: the state of a torch.optim optimizer on flat shards, and how it is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.machine.owners import Owners
from fzero.optim._apart import Apart, Parted, parted
from fzero.optim._bind import Bound
from fzero.optim._kept import KeptState
from fzero.optim._owned import Owned, owned_slots
from fzero.optim._piece import Piece
from fzero.optim._precision import Precision
from fzero.optim._step import Turn, Unit, makes_state_later
from fzero.optim.masters import Place, make_masters
from fzero.state import record, static


@record
class TorchState:
    """The state of a torch.optim optimizer on this rank, parallel to the list of flats."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates made
    slots: dict[str, tuple[Tensor, ...]]  # by name; of a flat that has no such slot, empty
    # By name, one for each param group, and then those of leaves that are apart.
    counters: dict[str, tuple[Tensor, ...]]
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit flats; of others, empty
    owned: Owned  # what is kept of parameters that an owner steps whole, parallel to these
    # (path, index of its counters), of leaves that do not count with their group.
    apart: Apart = static(default=())
    # Paths of leaves that took no step yet, where others did; see `Kept.late`.
    unstepped: tuple[str, ...] = static(default=())

    def number(self, path: str, group: int) -> int:
        """Return the index of the counters of the leaf at `path`, in this param group."""
        return dict(self.apart).get(path, group)


def turn_of(bound: Bound, state: TorchState, unused: frozenset[str]) -> Turn:
    """Return which leaves are stepped together in an update that leaves `unused` leaves out."""
    left = frozenset(path for path in unused if bound.group_at.get(path, -1) >= 0)
    size = 1 + max((len(bound.shared) - 1, *(number for _, number in state.apart)))
    now = parted(state.apart, left, lambda path: bound.group_at[path], size)
    if not makes_state_later(bound):
        return Turn(now)
    if not int(state.count):
        return Turn(now, first=True, unstepped=tuple(sorted(left)))
    numbers = dict(now.apart)
    fresh = frozenset(numbers.get(path, bound.group_at[path]) for path in state.unstepped)
    return Turn(now, fresh=fresh, unstepped=tuple(x for x in state.unstepped if x in left))


def units_of(bound: Bound, pieces: Sequence[Piece], now: Parted) -> list[Unit]:
    """Return the units of a step, each one parameter to the optimizer: a flat, or a leaf in it.

    A flat with leaves that count apart from each other, or are not stepped, is cut at them.
    """
    units: list[Unit] = []
    numbers, seen, cuts = dict(now.apart), set[int](), _cuts(pieces, now)
    for index, leaf, start, stop, first in pieces:
        kept = bound.kept_for(leaf)
        if kept is None or start >= stop:
            continue
        group = bound.group_at[leaf.path]
        number = numbers.get(leaf.path, group)
        if number in now.still:
            continue
        if not bound.elementwise[group]:
            if first < leaf.numel:  # else it is padding behind the leaf
                span = (start, start + leaf.numel)
                units.append(Unit(index, group, number, span, leaf.shape, kept))
        elif index in cuts:
            units.append(Unit(index, group, number, (start, stop), (stop - start,), kept))
        elif index not in seen:
            units.append(Unit(index, group, number, None, (), kept))
        seen.add(index)
    return units


def _cuts(pieces: Sequence[Piece], now: Parted) -> set[int]:
    """Return the flats whose leaves do not all count together."""
    if not now.apart:
        return set()
    numbers, found = dict(now.apart), dict[int, set[int]]()
    for piece in pieces:
        found.setdefault(piece.index, set()).add(numbers.get(piece.leaf.path, -1))
    return {index for index, some in found.items() if len(some) > 1}


def new_state(
    bound: Bound,
    params: Sequence[Tensor],
    pieces: Sequence[Piece],
    place: Place,
    owners: Owners | None = None,
) -> TorchState:
    """Return the state for flats [l] before the first step; `place` moves each tensor."""
    precision = bound.precision
    of_flat = {index: bound.kept_for(leaf) for index, leaf, *_ in pieces}  # alike in a flat
    flats = [(p, of_flat.get(i)) for i, p in enumerate(params)]
    wanted = [precision.master_weights and kept is not None for _, kept in flats]
    whole = frozenset[int]() if owners is None else owners.positions
    even = [(p, None if i in whole else kept) for i, (p, kept) in enumerate(flats)]
    every = [x for (g, *_), x in bound.kept.items() if owners is None or bound.elementwise[g]]
    slots = {
        name: tuple(place(_slot(name, p, kept, precision)) for p, kept in even)
        for name in sorted({name for kept in every for name in (*kept.slots, *kept.odd)})
    }
    begin = [bound.begin_of(group) for group in range(len(bound.shared))]
    counters = {  # 0 for a group that learns nothing, or has none
        name: tuple(some[name].clone() if name in some else torch.zeros(()) for some in begin)
        for name in sorted({name for some in begin for name in some})
    }
    masters = make_masters(params, wanted, place)
    count = torch.zeros((), dtype=torch.int64)
    owned = {} if owners is None else owned_slots(bound, owners, params, place)
    return TorchState(count=count, slots=slots, counters=counters, masters=masters, owned=owned)


def _slot(name: str, p: Tensor, kept: KeptState | None, precision: Precision) -> Tensor:
    if kept is None or name not in kept.slots:
        return p.new_empty(0)  # also of another shape: such a slot is made by the first step
    fill = kept.slots[name]
    as_stepped = fill.dtype == kept.dtype
    dtype = precision.kept(p.dtype) if as_stepped else fill.dtype
    return torch.full_like(p, fill.item(), dtype=dtype, requires_grad=False)
