"""What a user says of one call of a loss, beside its arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.errors import LayoutError

Weight = float | Tensor
"""The weight of one call on one rank: a number of 0 or more, or a scalar tensor."""


class Weighed(NamedTuple):
    """The weight of a backward, and whether its loss was multiplied by it already.

    Else each gradient is that it brings.
    """

    weight: Weight
    in_loss: bool = False


ADVANTAGE = (
    "A weight counts examples or tokens, and is 0 or more. What may be negative multiplies the "
    "loss: `loss = advantage * negative_log_likelihood` with weight=1, or the number of tokens"
)


@dataclass(frozen=True, slots=True, eq=False)
class GivenCall:
    """A call that brings gradients, and what a user says of it.

    Attributes:
        name: of the call, for errors.
        weight: of these gradients; None: they have none.

    Raises:
        LayoutError: for what is no weight. The values of a tensor are not read.

    Example:
        >>> GivenCall("grad_and_reduce", weight=3.0).weight
        3.0
    """

    name: str
    weight: Weight | None = None

    def __post_init__(self) -> None:
        """Check the weight."""
        weight = self.weight
        if weight is None:
            return
        if isinstance(weight, Tensor):
            good = weight.dim() == 0 and not weight.is_complex() and weight.dtype != torch.bool
            seen = f"a tensor of {weight.dtype}, shape {[*weight.shape]}"
        else:
            number: Any = weight  # what users give
            is_one = isinstance(number, int | float) and not isinstance(number, bool)
            good = is_one and math.isfinite(weight) and weight >= 0
            seen = repr(weight)
        if not good:
            raise LayoutError(
                f"{self.name}: weight={seen}.",
                cause="weights of single examples or tokens, a mask, or a count that is negative.",
                fix="give the sum of the weights of this call: a finite number of 0 or more, or a "
                f"tensor without dims, e.g. weight=mask.sum(). {ADVANTAGE}.",
            )


def weighed(loss: Tensor, weight: Weight | None, *, connected: bool) -> Weighed | None:
    """Return how the gradients of a loss get its weight.

    connected: whether it has called a collective. Then it is multiplied, by the weight in its
        dtype; NaN for 0, which the update refuses, where it is not finite: 0 times it is not 0.
    """
    if weight is None or not connected:
        return None if weight is None else Weighed(weight)
    by = torch.as_tensor(weight, device=loss.device).to(loss.dtype)
    lost = (by == 0) & ~torch.isfinite(loss.detach()).all()
    return Weighed(torch.where(lost, torch.nan, by), in_loss=True)


def with_weight(by: Tensor | None, how: Weighed | None) -> Tensor | None:
    """Return what a loss is multiplied by: `by`, and its weight if that is in it; None for 1."""
    if how is None or not how.in_loss:
        return by
    return torch.as_tensor(how.weight) if by is None else by * how.weight
