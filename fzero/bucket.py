"""What a backward has brought of one group: leaf by leaf, then one flat to be reduced."""

from __future__ import annotations

from torch import Tensor

from fzero.homes import lent
from fzero.packing import pack_copied, unpack
from fzero.state.layout import Layout


class Bucket:
    """The gradients of one group that this backward has brought, and not handed on."""

    __slots__ = ("_contiguous", "_flat", "_gradients", "_views", "_waited", "index", "layout")

    def __init__(self, layout: Layout, index: int, *, contiguous: bool) -> None:
        self.layout, self.index = layout, index
        self._contiguous = contiguous and len(layout.groups[index].leaves) > 1
        self._gradients: dict[int, Tensor] = {}
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._waited: Tensor | None = None

    def put(self, position: int, gradient: Tensor) -> None:
        """Add the gradient of one leaf."""
        if self._contiguous:
            gradient = self._copied(position, gradient)
        elif position in self._gradients:
            gradient = self._gradients[position] + gradient
        self._gradients[position] = gradient

    def _copied(self, position: int, gradient: Tensor) -> Tensor:
        """Copy it to its place in one buffer, so that autograd's own tensor can go at once."""
        if self._flat is None:
            self._flat = gradient.new_zeros(self.layout.full_numel(self.index))
            self._views = unpack(self.layout, self.index, self._flat)
        return self._views[position].add_(gradient)

    def give(self, flat: Tensor) -> None:
        """Add what has waited for this reduction, [W l]. It is not written to."""
        self._waited = flat

    @property
    def full(self) -> bool:
        """Whether every leaf has its gradient."""
        return len(self._gradients) == len(self.layout.groups[self.index].leaves)

    @property
    def some(self) -> bool:
        """Whether any leaf has, or anything has waited."""
        return bool(self._gradients) or self._waited is not None

    def take(self, written: set[int] | None = None, *, to_write: bool = False) -> Tensor | None:
        """Return [W l], and forget it; None if there is nothing.

        Autograd may hand out one memory for two parameters, in views of it. So a gradient that is
        not packed is copied if it is to be written to while the backward runs (`to_write`); or, if
        that is later, the second one in the same memory (`written`: where the others are).
        """
        gradients, self._gradients = self._gradients, {}
        flat, self._flat, self._views = self._flat, None, []
        waited, self._waited = self._waited, None
        if gradients and flat is None:
            count = len(self.layout.groups[self.index].leaves)
            flat = pack_copied(self.layout, self.index, [gradients.get(i) for i in range(count)])
            is_view = to_write and _is_view(flat, gradients.popitem()[1])
            if (is_view and waited is None) or (written is not None and _is_shared(flat, written)):
                flat = flat.clone()
        if flat is None or waited is None:
            return waited if flat is None else flat
        return lent(waited, flat.device) + flat


def _is_view(flat: Tensor, gradient: Tensor) -> bool:
    """Whether nothing was packed: `flat` is the memory of the gradient itself."""
    return flat.untyped_storage()._cdata == gradient.untyped_storage()._cdata


def _is_shared(flat: Tensor, written: set[int]) -> bool:
    """Whether a gradient is a view of more memory, or of that of an earlier one."""
    storage = flat.untyped_storage()
    shared = storage.nbytes() != flat.numel() * flat.element_size()
    shared = shared or storage._cdata in written
    written.add(storage._cdata)
    return shared
