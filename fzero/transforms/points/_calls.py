"""What transforms do in the backwards of a pass: to losses, and to this rank's own gradients.

begins     a backward begins, of some weight
change     g of a leaf -> what is added up in its place
reduced    what was reduced is there
ends       the state gets what the backward has brought
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.state import TrainState
from fzero.state.points import Builtin
from fzero.transforms.points._run import Locals
from fzero.transforms.points._slots import renewed

Changed = Callable[[int, Tensor, torch.dtype], Tensor]
"""(leaf, gradient, the dtype in which gradients add up) -> what is added up in its place."""


class CallPart:
    """What one transform does in the backwards of some states: nothing, but for what it overrides.

    Each state has a number.
    """

    looks = False
    """Whether it is shown losses."""

    def begins(self, number: int, state: TrainState, weighed: Any) -> TrainState:
        """A backward begins, or a forward, in which one may run: return the state for it."""
        return state

    def loss(self, value: Any, weight: Any) -> None:
        """A loss is about to be differentiated, without its scale."""

    def change(self, number: int) -> Changed | None:
        """Return what is done to each gradient of the backward that begins; None for nothing."""
        return None

    def settles(self) -> None:
        """The backward is over: what it has brought is put into states next."""

    def reduced(self, number: int, state: TrainState) -> TrainState:
        """Return the state with what reductions have changed."""
        return state

    def ends(self, number: int, state: TrainState) -> TrainState:
        """Return the state that gets what the backward has brought."""
        return state

    def put_aside(self, number: int, state: TrainState) -> TrainState:
        """Return the state that gets what a backward inside of a forward has brought."""
        return self.ends(number, state)

    def drop_losses(self) -> None:
        """The losses that were shown are not differentiated any more."""

    def drop(self) -> None:
        """The backward raised, or brought nothing."""


class ByPath(CallPart):
    """The functions of users at `local`."""

    def __init__(self, states: Sequence[TrainState]) -> None:
        self._locals = [Locals(state) for state in states]

    def begins(self, number: int, state: TrainState, weighed: Any) -> TrainState:
        state = renewed(state, "backward")
        self._locals[number] = Locals(state)
        return state

    def change(self, number: int) -> Changed | None:
        own = self._locals[number]
        return (lambda leaf, gradient, dtype: own(leaf, gradient)) if own else None

    def ends(self, number: int, state: TrainState) -> TrainState:
        return self._locals[number].put(state)


class Calls:
    """What all transforms do in the backwards of some states.

    acting: states -> the transforms that act in their backwards, from the outside in.
    """

    def __init__(
        self,
        states: Sequence[TrainState],
        acting: Callable[[Sequence[TrainState]], Sequence[Builtin]],
        reducer: Any,
    ) -> None:
        self._acting, self._reducer = acting, reducer
        self._parts: dict[str, CallPart] = {}
        self.look_up(states)

    def look_up(self, states: Sequence[TrainState]) -> None:
        """A forward or a backward begins: calls since the last one may have changed what acts."""
        before, self._parts = self._parts, {}
        for one in self._acting(states):
            part = before.get(one.name) or (one.calls and one.calls(states, self._reducer))
            if part is not None:
                self._parts[one.name] = part

    @property
    def looks(self) -> bool:
        """Whether somebody is shown losses."""
        return any(part.looks for part in self._parts.values())

    def loss(self, value: Any, weight: Any = None) -> None:
        """Show a loss that is about to be differentiated, without its scale."""
        for part in self._parts.values():
            part.loss(value, weight)

    def begins(self, number: int, state: TrainState, weighed: Any = None) -> TrainState:
        """Return a state for the backward that begins."""
        for part in self._parts.values():
            state = part.begins(number, state, weighed)
        return state

    def change(self, number: int) -> Changed | None:
        """Return what is done to each gradient of a state; None for nothing."""
        found = [part.change(number) for part in self._parts.values()]
        changes = [one for one in found if one is not None]
        if len(changes) < 2:
            return changes[0] if changes else None

        def changed(leaf: int, gradient: Tensor, dtype: torch.dtype) -> Tensor:
            for one in changes:
                gradient = one(leaf, gradient, dtype)
            return gradient

        return changed

    def settles(self) -> None:
        """The backward is over."""
        for part in self._parts.values():
            part.settles()

    def reduced(self, number: int, state: TrainState) -> TrainState:
        """Return the state with what reductions have changed."""
        for part in self._parts.values():
            state = part.reduced(number, state)
        return state

    def ends(self, number: int, state: TrainState) -> TrainState:
        """Return the state that gets what the backward has brought."""
        for part in self._parts.values():
            state = part.ends(number, state)
        return state

    def put_aside(self, number: int, state: TrainState) -> TrainState:
        """Return the state that gets what a backward inside of a forward has brought."""
        for part in self._parts.values():
            state = part.put_aside(number, state)
        return state

    def drop_losses(self) -> None:
        """The losses that were shown are not differentiated any more."""
        for part in self._parts.values():
            part.drop_losses()

    def drop(self) -> None:
        """The backward raised, or brought nothing."""
        for part in self._parts.values():
            part.drop()
