"""`TorchState`: what a torch.optim optimizer keeps on flats, and of parameters with owners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from fzero.machine.owners import Owners
from fzero.optim._apart import Apart
from fzero.optim._base import Base
from fzero.optim._bind import Bound
from fzero.optim._kept import KeptState
from fzero.optim._piece import Piece
from fzero.optim._precision import Precision
from fzero.optim._step import in_order
from fzero.optim.masters import Place, make_masters
from fzero.state import record, static
from fzero.state.layout import Leaf

Owned = dict[str, tuple[Tensor, ...]]
"""{name: what a rank keeps of each parameter with an owner; empty on those that do not own it}."""


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
    begin = _begin(name, kept, precision, p.dtype)
    if begin is None:
        return p.new_empty(0)  # also of another shape: such a slot is made by the first step
    return torch.full_like(p, begin[0], dtype=begin[1], requires_grad=False)


def _begin(
    name: str, kept: KeptState | None, precision: Precision, dtype: torch.dtype
) -> tuple[float, torch.dtype] | None:
    """With which value, and in which dtype, a slot of a parameter begins; None: it has no such."""
    if kept is None or name not in kept.slots:
        return None
    fill = kept.slots[name]
    return fill.item(), precision.kept(dtype) if fill.dtype == kept.dtype else fill.dtype


def owned_slots(bound: Bound, owners: Owners, params: Sequence[Tensor], place: Place) -> Owned:
    """Return the slots before the first step; one of another shape is made by it."""
    kept = [bound.kept_for(one.leaf) if owners.has(one) else None for one in owners.leaves]
    names = sorted({name for x in kept if x is not None for name in (*x.slots, *x.odd)})
    mine = set(owners.mine)

    def made(name: str, number: int) -> Tensor:
        one = owners.leaves[number]
        flat, size = params[one.position], one.leaf.numel if number in mine else 0
        begin = _begin(name, kept[number], bound.precision, flat.dtype)
        if begin is None:
            return flat.new_empty(0)
        return place(torch.full((size,), begin[0], dtype=begin[1], device=flat.device))

    return {name: tuple(made(name, k) for k in range(len(kept))) for name in names}


class KeepsOwned(Base):
    """An optimizer whose state has what owners keep of whole parameters."""

    __slots__ = ()

    def _bound(self) -> Bound:
        raise NotImplementedError

    @property
    def owned_names(self) -> Collection[str]:
        """The names in `owned`."""
        bound = self._bound()
        whole = [kept for (group, *_), kept in bound.kept.items() if not bound.elementwise[group]]
        return {name for kept in whole for name in (*kept.slots, *kept.odd)}

    def owned(self, state: TorchState) -> Owned:
        """Return what is kept of parameters with owners."""
        return state.owned

    def with_owned(self, state: TorchState, owned: Mapping[str, Sequence[Tensor]]) -> TorchState:
        """Return the state with something else kept of parameters with owners."""
        return replace(
            state, owned={name: tuple(map(in_order, some)) for name, some in owned.items()}
        )

    def kept_of(self, leaf: Leaf) -> Collection[str]:
        """Return the slots of a leaf with an owner that have an element for each of its own."""
        kept = self._bound().kept_for(leaf)
        return () if kept is None else kept.slots.keys()

    def made_by_steps(self, leaf: Leaf) -> Collection[str]:
        """Return the slots of a leaf with an owner that its first step makes, in any shape."""
        kept = self._bound().kept_for(leaf)
        return () if kept is None else kept.odd

    def kept_numel(self, leaf: Leaf) -> int:
        """Return about how many elements the owner of a leaf keeps of it.

        As the class says, by `kept_numel(shape, group)`; or by the shapes of what it has kept of a
        small parameter, whose sides are those of this one.
        """
        bound = self._bound()
        kept = bound.kept_for(leaf)
        if kept is None:
            return 0
        says = getattr(bound.instance, "kept_numel", None)
        if says is not None:
            return int(says(leaf.shape, bound.instance.param_groups[bound.group_at[leaf.path]]))
        forms = [torch.as_tensor(kept.sample[name]).shape for name in kept.odd]
        odd = sum(prod(as_large(form, kept.shape, leaf.shape)) for form in forms)
        return leaf.numel * len(kept.slots) + odd


def as_large(form: Sequence[int], small: Sequence[int], large: Sequence[int]) -> list[int]:
    """Return the shape that something kept of a small parameter has of a large one.

    A size that is the product of some sides of the small one is that of the same of the large one.

    Example:
        >>> as_large((7, 7), (7, 6), (512, 64)), as_large((12,), (5, 3, 2, 2), (64, 3, 7, 7))
        ([512, 512], [147])
    """
    ends = range(1, len(small) + 1)
    spans = sorted(((i, j) for j in ends for i in range(j)), key=lambda span: span[1] - span[0])

    def of(size: int) -> int:
        found = (prod(large[i:j]) for i, j in spans if size > 1 and prod(small[i:j]) == size)
        return next(found, size)

    return [of(size) for size in form]
