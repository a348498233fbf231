"""One life of an engine's gradients: from the backward that brings the first to what drops them.

A stand-in that somebody keeps belongs to its life. When that is over, it shows what it showed last,
as a gradient of torch does after `zero_grad()`, or raises: never the next gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fzero.errors import PhaseError
from fzero.state import TrainState


class Serves(Protocol):
    """Whoever has the gradients that stand-ins stand for.

    device: where they are. stage: of the engine. shows: whether every rank has all of them.
    at_hand: whether it shows them now without a collective. edits: how often they have changed.
    """

    device: torch.device
    stage: int
    shows: bool
    edits: int

    @property
    def at_hand(self) -> bool: ...

    def norm(self, held: Any, order: float) -> Tensor:
        """Return the norm of a whole gradient. A collective."""
        ...

    def range(self, held: Any) -> tuple[int, int]:
        """Return which elements of a gradient this rank has: the first, and the one behind."""
        ...

    def piece(self, held: Any, name: str) -> Tensor:
        """Return those, as an update would use them: [n], a copy. A collective."""
        ...

    def told(self, operands: Sequence[Any]) -> list[Any]:
        """Return what ranks compare of the operands of an operator."""
        ...

    def write(
        self, held: Any, name: str, told: Sequence[Any], run: Callable[[Tensor], Tensor]
    ) -> None:
        """Make this rank's elements of a gradient what `run` makes of them. A collective."""
        ...

    def zero(self, held: Any) -> None:
        """Set a gradient to zero."""
        ...

    def values(self, held: Any) -> Tensor:
        """Return the elements of a gradient, a copy. Only where this `shows` them."""
        ...

    def require_no_window(self, name: str) -> None:
        """Raise `PhaseError` inside of a window, where they are not reduced."""
        ...


class HoldsState(Protocol):
    """Whoever has the state that the gradients are in."""

    @property
    def state(self) -> TrainState:
        """The state now."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it is used no more."""
        ...

    @property
    def user_dropped(self) -> bool:
        """Whether the user has set every `p.grad` to None since."""
        ...

    def drop_if_user_did(self) -> None:
        """Forget the gradients if so."""
        ...

    def require_not_closed(self) -> None:
        """Raise `PhaseError` if it is used no more."""
        ...

    def require_no_window(self, name: str) -> None:
        """Raise `PhaseError` inside a window."""
        ...

    def call(self, name: str) -> None:
        """Wait until every rank makes this call."""
        ...

    def with_gradients(self, name: str) -> TrainState:
        """Return the state with all gradients reduced, for a call of this name. A collective."""
        ...

    def put_each(self, change: Callable[[TrainState], TrainState]) -> None:
        """Change the state, and that from before a window."""
        ...


class Lives(Serves, Protocol):
    """Whoever has them now."""

    def notice(self) -> None:
        """Drop them if the user has dropped them."""
        ...


class Life:
    """One life of gradients. `end` ends it, and says who has them from then on, if anybody has."""

    def __init__(self, by: Lives) -> None:
        self._by = weakref.ref(by)  # weak: the garbage collector does not look into p.grad
        self.device = by.device
        self._over = False
        self._left: Serves | None = None

    def end(self, left: Serves | None) -> None:
        """They are dropped; `left` has what they were."""
        self._over, self._left = True, left

    def by(self, path: str) -> Serves:
        """Return who has the gradients of this life. Raises `PhaseError` if nobody has."""
        by = self._by()
        if by is not None and not self._over:
            by.notice()
        if self._left is not None:
            return self._left
        if self._over:
            raise PhaseError(
                f"a gradient of {path} from before it was dropped or used.",
                cause="a p.grad that was kept over zero_grad() or step(). It was never reduced, as "
                "in a window; or the update has scaled it in place (max_norm, a loss scale).",
                fix="take a copy while it is there: engine.full_gradient(path), or p.grad.clone() "
                "at stage 0.",
            )
        if by is None:
            raise PhaseError(
                "p.grad is the stand-in of an engine that is gone.",
                cause="the engine was made in a function, and nothing holds it any more.",
                fix="keep the engine for as long as its module is used, or close() it.",
            )
        return by

    @property
    def at_hand(self) -> bool:
        """Whether elements are there without a collective."""
        by = self._left if self._over else self._by()
        return by is not None and by.at_hand
