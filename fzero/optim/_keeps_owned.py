"""The part of a torch.optim optimizer that is asked about parameters with owners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

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
