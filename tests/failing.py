"""The identity, with a backward that raises, or does something else first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, do: Callable[[], None]) -> Tensor:
        ctx.do = do
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.do()
        return gradient, None


def in_backward(x: Tensor, do: Callable[[], None]) -> Tensor:
    """Return x; its backward calls `do` first."""
    return _InBackward.apply(x, do)


def fails_in_backward(x: Tensor, error: BaseException | type[BaseException]) -> Tensor:
    """Return x; its backward raises `error`."""

    def fail() -> None:
        raise error

    return in_backward(x, fail)
