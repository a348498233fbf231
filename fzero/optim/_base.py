"""What optimizers of a state have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from torch import Tensor


class Base:
    """An optimizer with one elementwise rule for all parameters, unless it says otherwise."""

    __slots__ = ()

    @property
    def elementwise(self) -> bool:
        """Whether a part of a leaf may be updated alone."""
        return True

    @property
    def leafwise(self) -> bool:
        """Whether a leaf may be updated without the others."""
        return self.elementwise

    def needs_whole(self, path: str) -> bool:
        """Whether a part of the leaf at `path` may not be updated alone."""
        return not self.elementwise

    def group_of(self, path: str) -> int:
        """Return the number of the buffers that a leaf may be in: leaves of one share them."""
        return 0

    def bind(self, params: Any) -> Self:
        """Return the optimizer of these parameters, {path: tensor}."""
        return self

    def slots(self, state: Any) -> Mapping[str, Sequence[Tensor]]:
        """Return {name: flats} of what is kept by element, masters too; nothing of a foreign state.

        Names are torch.optim's. A flat that has no such slot has an empty one.
        """
        return {}

    @property
    def odd_slots(self) -> frozenset[str]:
        """The slots that have another shape than their parameters: the row means of Adafactor."""
        return frozenset()

    @property
    def counts_by_leaf(self) -> bool:
        """Whether `counted` and `recounted` know what each leaf counts."""
        return False

    def counted(self, state: Any, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return {name: {path: what it counts of a leaf's updates}}, by torch.optim's names.

        Of the leaves at `paths`, those that it steps. A state's own tensors.
        """
        return {}

    def counters(self, state: Any, path: str) -> dict[str, Tensor]:
        """Return `counted` of one leaf."""
        return {name: some[path] for name, some in self.counted(state, [path]).items()}

    def shares(self, path: str, name: str) -> bool:
        """Whether a counter of the leaf at `path` is one for its whole param group."""
        return False

    def recounted(
        self,
        state: Any,
        paths: Sequence[str],
        counters: Mapping[str, Mapping[str, Tensor]],
        *,
        count: int | None = None,
        unstepped: Collection[str] = (),
    ) -> Any:
        """Return the state with other counters: what `counted` gives for all leaves that learn.

        count: the number of updates; None: as it is. unstepped: leaves that took no step yet.
        """
        return state

    def unstepped(self, state: Any) -> Sequence[str]:
        """Return the paths of the leaves that took no step yet, where that makes a difference."""
        return ()

    def anew(self, state: Any, fresh: Any) -> Any:
        """Return `fresh`, a state before its first step, with what a reset of it leaves."""
        return fresh

    def begun(self, state: Any, paths: Sequence[str], path: str) -> Any:
        """Return the state in which what it keeps for the leaf at `path` is no first state."""
        return state

    def skips(self, params: Sequence[Tensor], state: Any) -> bool:
        """Whether `advance` takes `found_inf` and `grad_scale`: for updates that may be skipped."""
        return False
