"""`no_optimizer`: for a model that is evaluated and differentiated, but never updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fzero.errors import PhaseError
from fzero.optim._base import Base
from fzero.optim._piece import Piece
from fzero.state.layout import Leaf
from fzero.state.setup import ParamGroups, SavedNames


@dataclass(frozen=True, slots=True)
class NoOptimizer(Base):
    """An optimizer without state that updates nothing: what `no_optimizer` returns."""

    def init(
        self, params: Sequence[Tensor], pieces: Sequence[Piece] = (), *, place: Any = None
    ) -> tuple[()]:
        """Return no state."""
        return ()

    def advance(
        self, params: Sequence[Tensor], grads: Any, state: Any, *args: Any, **options: Any
    ) -> tuple[list[Tensor], Any]:
        """Return ([], state) for no parameters; raise `PhaseError` if there are any."""
        if not params:
            return [], state
        raise without_optimizer()

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """Return the line that ranks compare."""
        return ["no optimizer"]

    def saved_names(self, state: Any, leaves: Sequence[Leaf]) -> SavedNames:
        """Return its name in a checkpoint."""
        return SavedNames(rule="no optimizer")

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return no param group: no leaf is stepped."""
        return ParamGroups(of_leaf=(-1,) * len(leaves), options=())

    def __repr__(self) -> str:
        return "no optimizer"


def no_optimizer() -> NoOptimizer:
    """Return the optimizer of a model that is only read: a teacher, a reward model.

    `fzero.init` with it freezes every leaf: there are no gradients and no optimizer states, no
    gradient crosses ranks, and `apply_gradients` leaves the model as it is. Under one loss with
    states that learn it is read; a loss by which nothing else learns raises. A model that has
    gradients, and is never updated, is made with `fzero.optim.sgd(0.0)`.

    Returns:
        What `init` takes in the place of an optimizer.

    Example:
        >>> import torch, fzero
        >>> teacher = fzero.init([torch.ones(2)], fzero.optim.no_optimizer(), stage=3)
        >>> fzero.evaluate(lambda p, x: (p[0] * x).sum(), teacher)(3.0)
        tensor(6.)
    """
    return NoOptimizer()


def without_optimizer() -> PhaseError:
    """Return the error of a step without an optimizer."""
    return PhaseError(
        "step() of an engine without optimizer.",
        cause="Engine(module, stage=...) is for a model that is not trained.",
        fix="pass a torch.optim optimizer, its class or a factory.",
    )
