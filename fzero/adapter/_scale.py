"""A static loss scale, and the guard against a backward that went around it."""

from __future__ import annotations

from torch import Tensor

from fzero.adapter._autograd import current_graph_task
from fzero.errors import PhaseError, explain


class LossScale:
    """Multiplies losses, and knows by their hooks which graph task began at a scaled one."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._task: int | None = -1

    def apply(self, loss: Tensor) -> Tensor:
        """Return loss x scale."""
        scaled = loss * self._scale
        if scaled.requires_grad:  # its hook comes before that of any output or parameter
            scaled.register_hook(self._saw)
        return scaled

    def require(self, outer_task: int | None) -> None:
        """A parameter gets a gradient: raise `PhaseError` if it is not that of a scaled loss."""
        if self._scale == 1.0 or self._task in (current_graph_task(), outer_task):
            return
        raise PhaseError(
            explain(
                f"a backward without engine.scale; loss_scale={self._scale}.",
                cause="plain loss.backward() where the update divides by the loss scale.",
                fix="write engine.scale(loss).backward().",
            )
        )

    def _saw(self, gradient: Tensor) -> None:
        self._task = current_graph_task()
