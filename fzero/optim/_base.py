"""What optimizers of a state have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def counters(self, state: Any, path: str) -> Mapping[str, Tensor]:
        """Return what counts the updates of the leaf at `path`, by torch.optim's names."""
        return {}

    def skips(self, params: Sequence[Tensor], state: Any) -> bool:
        """Whether `advance` takes `found_inf` and `grad_scale`: for updates that may be skipped."""
        return False
