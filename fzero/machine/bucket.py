"""The gradients of one group: collected leaf by leaf, then packed into one flat to be reduced."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.machine.offload import to_device
from fzero.machine.packing import pack_copied, unpack
from fzero.state.layout import Layout, as_real


class Bucket:
    """The gradients of one group that this backward has produced and that are not yet reduced."""

    __slots__ = (
        "_contiguous",
        "_flat",
        "_gradients",
        "_owned",
        "_views",
        "_waited",
        "index",
        "layout",
    )

    def __init__(self, layout: Layout, index: int, *, contiguous: bool) -> None:
        self.layout, self.index = layout, index
        self._contiguous = contiguous and len(layout.groups[index].leaves) > 1
        self._gradients: dict[int, Tensor] = {}
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._waited: Tensor | None = None
        self._owned = False

    def add(self, position: int, gradient: Tensor) -> None:
        """Add the gradient of one leaf."""
        if self._contiguous:
            gradient = self._copied(position, gradient)
        elif position in self._gradients:
            gradient = self._gradients[position] + gradient
        self._gradients[position] = gradient

    def _copied(self, position: int, gradient: Tensor) -> Tensor:
        """Copy a gradient to its place in one buffer, so that autograd's tensor can be freed."""
        if self._flat is None:
            self._flat = as_real(gradient).new_zeros(self.layout.full_numel(self.index))
            self._views = unpack(self.layout, self.index, self._flat)
        return self._views[position].add_(gradient)

    def add_waiting(self, flat: Tensor, *, owned: bool = False) -> None:
        """Add gradients [W l] of earlier backwards. They are written to only if `owned`."""
        self._waited, self._owned = flat, owned

    @property
    def is_full(self) -> bool:
        """Whether every leaf has its gradient."""
        return len(self._gradients) == len(self.layout.groups[self.index].leaves)

    @property
    def has_any(self) -> bool:
        """Whether any leaf has its gradient, or gradients of earlier backwards were added."""
        return bool(self._gradients) or self._waited is not None

    def pop(
        self, written: set[int] | None = None, device: torch.device | None = None
    ) -> Tensor | None:
        """Remove and return the flat gradient [W l]; None if the bucket is empty.

        device: where it is wanted; None: where it is, for what has waited may be offloaded.
        Autograd may hand out one memory for two parameters, in views of it. So where gradients are
        written to later, the second one in the same memory is copied: `written` says where the
        others are.
        """
        gradients, flat, waited = self._emptied()
        if gradients is not None:
            flat = pack_copied(self.layout, self.index, gradients)
            if written is not None and _is_shared(flat, written):
                flat = flat.clone()
        if waited is None:
            return flat
        if flat is None:
            return waited if device is None else to_device(waited, device)
        return to_device(waited, flat.device) + flat

    def pop_into(self, total: Tensor, factor: float) -> None:
        """total += factor * gradients, leaf by leaf, without a flat between; empty the bucket."""
        gradients, flat, waited = self._emptied()
        for whole in (flat, waited):
            if whole is not None:
                total.add_(_times(whole, total.dtype, factor))
        if gradients is not None:
            for place, gradient in zip(
                unpack(self.layout, self.index, total), gradients, strict=True
            ):
                if gradient is not None:
                    place.add_(_times(gradient, place.dtype, factor))

    def pop_owned(self, divisor: float, device: torch.device) -> Tensor | None:
        """Remove and return the flat gradient [W l] / divisor, in memory of its own on a device.

        The rest of the backward may still read the memory of what it has brought. The division is
        made as gradients are copied, for a pass over memory of its own would cost as much again.
        """
        gradients, flat, waited = self._emptied()
        if gradients is not None:
            flat = pack_copied(self.layout, self.index, gradients, divisor=divisor)
        elif flat is not None and divisor != 1.0:
            flat.div_(divisor)
        if waited is None:
            return flat
        if flat is None:
            return to_device(waited.div_(divisor) if self._owned else waited / divisor, device)
        return torch.add(flat, to_device(waited, flat.device), alpha=1 / divisor)

    def _emptied(self) -> tuple[list[Tensor | None] | None, Tensor | None, Tensor | None]:
        """Empty the bucket: (leaves to pack, or the buffer they are in, earlier gradients)."""
        gradients, self._gradients = self._gradients, {}
        flat, self._flat, self._views = self._flat, None, []
        waited, self._waited = self._waited, None
        if not gradients or flat is not None:
            return None, flat, waited
        count = len(self.layout.groups[self.index].leaves)
        return [gradients.get(i) for i in range(count)], None, waited


def _times(gradient: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    return gradient if factor == 1.0 else gradient.to(dtype) * factor


def _is_shared(flat: Tensor, written: set[int]) -> bool:
    """Whether a gradient is a view of a larger storage, or shares it with an earlier one."""
    storage = flat.untyped_storage()
    shared = storage.nbytes() != flat.numel() * flat.element_size()
    shared = shared or storage._cdata in written
    written.add(storage._cdata)
    return shared
