"""The part of a torch.optim optimizer that is asked about parameters with owners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from fzero.optim._base import Base
from fzero.optim._bind import Bound
from fzero.optim._owned import Owned
from fzero.optim._step import in_order
from fzero.optim._torch_state import TorchState
from fzero.state.layout import Leaf


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
