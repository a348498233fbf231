"""The optimizer of a model that is read and differentiated, and not stepped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fzero.errors import PhaseError, explain
from fzero.optim._piece import Piece
from fzero.state.layout import Leaf
from fzero.state.setup import ParamGroups, SavedNames


@dataclass(frozen=True, slots=True)
class NoOptimizer:
    """Has no state, and steps nothing."""

    elementwise: bool = True

    def bind(self, params: Mapping[str, Tensor]) -> NoOptimizer:
        """Return itself."""
        return self

    def group_of(self, path: str) -> int:
        """Return 0: all parameters may share buffers."""
        return 0

    def init(
        self, params: Sequence[Tensor], pieces: Sequence[Piece] = (), *, place: Any = None
    ) -> tuple[()]:
        """Return no state."""
        return ()

    def advance(self, *args: Any, **options: Any) -> tuple[list[Tensor], Any]:
        """Raise `PhaseError`."""
        raise no_optimizer()

    def skips(self, params: Sequence[Tensor], state: Any) -> bool:
        """It steps nothing, also without an overflow."""
        return False

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """What ranks compare."""
        return ["no optimizer"]

    def saved_names(self, state: Any, leaves: Sequence[Leaf]) -> SavedNames:
        """What a checkpoint calls it."""
        return SavedNames(rule="no optimizer")

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return no group."""
        return ParamGroups(of_leaf=(-1,) * len(leaves), options=())

    def __repr__(self) -> str:
        return "no optimizer"


def no_optimizer() -> PhaseError:
    """Return the error of a step without an optimizer."""
    return PhaseError(
        explain(
            "step() of an engine without optimizer.",
            cause="Engine(module, stage=...) is for a model that is not trained.",
            fix="pass a torch.optim optimizer, its class or a factory.",
        )
    )
