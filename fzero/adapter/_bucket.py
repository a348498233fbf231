"""One group's gradients on one rank: what a backward brings, what waits, what came back.

put ... put                  pending: this backward's, droppable if it raises
keep: pending -> kept        this rank's own sum, in the accumulation dtype
take: pending + kept -> [W l] on the wire
add:  rows -> reduced        the sum over ranks / W, added up over backwards
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fzero.packing import pack_copied, unpack
from fzero.state.layout import Layout


class Pending(Protocol):
    """Where a backward's gradients of one group are until they are launched or kept."""

    def put(self, position: int, gradient: Tensor) -> bool:
        """Add one parameter's gradient; True if it is the last one that was missing."""
        ...

    def take(self) -> Tensor | None:
        """Return them as one tensor, and forget them; None if there are none."""
        ...

    def drop(self) -> None:
        """Forget them."""
        ...

    @property
    def some(self) -> bool:
        """Whether anything was put."""
        ...

    @property
    def tensors(self) -> list[Tensor]:
        """What is held."""
        ...


class PerParameter:
    """Keeps the tensors that autograd made; packs them in one pass when they are taken."""

    def __init__(self, layout: Layout, index: int) -> None:
        self._layout, self._index = layout, index
        self._count = len(layout.groups[index].leaves)
        self._gradients: dict[int, Tensor] = {}

    def put(self, position: int, gradient: Tensor) -> bool:
        """Add one parameter's gradient; True if it is the last one that was missing."""
        held = self._gradients
        if position in held:
            held[position] = held[position] + gradient
            return False
        held[position] = gradient
        return len(held) == self._count

    def take(self) -> Tensor | None:
        """Return them as one tensor, and forget them; None if there are none."""
        held, self._gradients = self._gradients, {}
        if not held:
            return None
        if self._count == 1:
            held[0] = _owned(held[0])
        if self._layout.ranks == 1:  # one parameter, in its own shape: nothing to pack
            return held[0]
        return pack_copied(self._layout, self._index, [held.get(i) for i in range(self._count)])

    def drop(self) -> None:
        """Forget them."""
        self._gradients = {}

    @property
    def some(self) -> bool:
        """Whether anything was put."""
        return bool(self._gradients)

    @property
    def tensors(self) -> list[Tensor]:
        """What is held."""
        return list(self._gradients.values())


class Contiguous:
    """Copies each gradient into one buffer as it comes, so that autograd's tensor can go."""

    def __init__(self, layout: Layout, index: int, device: torch.device) -> None:
        self._layout, self._index, self._device = layout, index, device
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing: set[int] = set()

    def put(self, position: int, gradient: Tensor) -> bool:
        """Add one parameter's gradient; True if it is the last one that was missing."""
        if self._flat is None:
            self._allocate()
        if position not in self._missing:
            self._views[position].add_(gradient)
            return False
        self._missing.discard(position)
        self._views[position].copy_(gradient)
        return not self._missing

    def _allocate(self) -> None:
        group = self._layout.groups[self._index]
        self._flat = torch.zeros(
            self._layout.full_numel(self._index), dtype=group.dtype, device=self._device
        )
        self._views = unpack(self._layout, self._index, self._flat)
        self._missing = set(range(len(group.leaves)))

    def take(self) -> Tensor | None:
        """Return them as one tensor, and forget them; None if there are none."""
        flat = self._flat
        self.drop()
        return flat

    def drop(self) -> None:
        """Forget them."""
        self._flat, self._views = None, []

    @property
    def some(self) -> bool:
        """Whether anything was put."""
        return self._flat is not None

    @property
    def tensors(self) -> list[Tensor]:
        """What is held."""
        return [] if self._flat is None else [self._flat]


class Bucket:
    """One group that learns. Tensors are [W l] until they are reduced; on one rank, its leaf's."""

    def __init__(
        self,
        layout: Layout,
        index: int,
        pending: Pending,
        *,
        accumulate: torch.dtype,
        wire: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.index, self.pending = layout, index, pending
        self.accumulate, self.wire, self.device = accumulate, wire, device
        self.kept: Tensor | None = None
        self.reduced: Tensor | None = None

    def keep(self) -> bool:
        """Move what is pending to what waits on this rank; False if there was nothing."""
        new = self.pending.take()
        if new is None:
            return False
        if self.kept is None:
            self.kept = new.to(self.accumulate)
        else:
            self.kept.add_(new)
        return True

    def set_aside(self) -> Tensor | None:
        """Return what waits, and forget it."""
        waited, self.kept = self.kept, None
        return waited

    def put_back(self, waited: Tensor | None, *, add: bool) -> None:
        """Let `waited` wait again: with what has come since, or in its place."""
        if add and self.kept is not None:
            waited = self.kept if waited is None else waited.add_(self.kept)
        self.kept = waited

    def collect(self) -> Tensor | None:
        """Return all that has not crossed ranks, and forget it; None if there is nothing."""
        if self.kept is None:
            return self.pending.take()
        self.keep()
        return self.set_aside()

    def take(self) -> Tensor:
        """Return all that has not crossed ranks, for the wire: [W l], zeros if there is nothing."""
        local = self.collect()
        return self.nothing() if local is None else local.to(self.wire)

    def nothing(self) -> Tensor:
        """Return zeros [W l], for a collective that other ranks have something for."""
        numel = self.layout.full_numel(self.index)
        return torch.zeros(numel, dtype=self.wire, device=self.device)

    def add(self, rows: Tensor) -> None:
        """Add reduced rows to the gradient. `rows` is given up by the caller."""
        if self.reduced is None:
            self.reduced = rows.to(self.accumulate)
        else:
            self.reduced.add_(rows)

    def clear(self) -> None:
        """Forget every gradient, wherever it stands."""
        self.pending.drop()
        self.kept = self.reduced = None

    @property
    def waits(self) -> bool:
        """Whether there is a gradient here that has not crossed ranks."""
        return self.kept is not None or self.pending.some

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return self.pending.tensors + [x for x in (self.kept, self.reduced) if x is not None]


def _owned(x: Tensor) -> Tensor:
    """Return `x`, or a copy if somebody else has its memory: it will be written to.

    Autograd hands on what the user gave, as in `out.backward(g)`, where `out` is a view of `x`.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    alone = count is not None and count(x.untyped_storage()._cdata) <= 2  # x and the look at it
    return x if alone else x.clone()
