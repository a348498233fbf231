"""Methods of an engine by which users scale its losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fzero.adapter.driver import Driver
from fzero.state.train_state import Weight


def scale(driver: Driver, loss: Tensor, *, weight: Weight | None = None) -> Tensor:
    """Return loss x `loss_scale`: the loss itself without one.

    weight: of the backward that begins here, as in `backward`; the value stays as it is.

    With a scale every backward comes from here, or is made by `backward(loss)`, which scales by
    itself: a plain loss.backward() raises `PhaseError` before any gradient is used. So does
    this for a loss that was scaled already; `LayoutError` for what is no floating tensor.
    """
    driver.require_not_closed()
    return driver.losses.learned_by_all(loss, weight)


def scale_if_loss(driver: Driver, x: Any) -> Any:
    """Return `scale(x)` of a loss that was not scaled yet; anything else as it is."""
    return scale(driver, x) if driver.losses.is_plain(x) else x


def needs_scaler(driver: Driver) -> bool:
    """Whether a plain loss.backward() raises: whether there is a loss scale but 1."""
    return driver.losses.are_others
