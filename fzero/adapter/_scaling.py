"""What a user calls for the loss scale of an engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fzero.adapter._driver import Driver
from fzero.state.scale import read


class Scaling:
    """The part of an engine that multiplies losses; its update divides by the same scale.

    With a `loss_scale` every backward comes from `scale(loss)`, or is made by `backward(loss)`,
    which scales by itself. A plain loss.backward() raises `PhaseError` before any gradient is used.
    """

    _driver: Driver

    def scale(self, loss: Tensor) -> Tensor:
        """Return loss x `loss_scale`: the loss itself without one.

        Args:
            loss: a floating tensor.

        Raises:
            LayoutError: for anything else.
            PhaseError: for a loss that was scaled already.
        """
        return self._driver.scaled(loss)

    def needs_scaler(self) -> bool:
        """Whether a plain loss.backward() raises: whether there is a loss scale but 1."""
        return self._driver.multiplier is not None

    def scale_if_loss(self, x: Any) -> Any:
        """Return `scale(x)` of one floating number that has a graph; anything else as it is.

        So is a loss that was scaled already.
        """
        number = isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()
        if not number or x.grad_fn is None or self._driver.losses.is_scaled(x):
            return x
        return self.scale(x)

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1.0 without one. The host waits for the device.

        `engine.state.scale.scale` is the tensor, for which it does not wait.
        """
        held = self._driver.state.scale
        return 1.0 if held is None else float(read(held).scale)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update found an overflow. The host waits for the device."""
        held = self._driver.state.scale
        return held is not None and bool(held.overflowed)
