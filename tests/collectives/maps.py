"""The three maps over ranks, as fzero has them and as plain formulas on the stacked ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fzero


class Map(NamedTuple):
    """`run` on one rank; `formula` on all ranks' tensors stacked: [W, ..] -> [W, ..]."""

    run: Callable[[Tensor], Tensor]
    formula: Callable[[Tensor], Tensor]
    adjoint: str


def gathered(xs: Tensor) -> Tensor:
    """y_r = concat(x_0, x_1, ..)."""
    return torch.stack([torch.cat(list(xs))] * len(xs))


def scattered(xs: Tensor) -> Tensor:
    """y_r = rows r of the sum."""
    return xs.sum(0).reshape(len(xs), xs.shape[1] // len(xs), *xs.shape[2:])


def reduced(xs: Tensor) -> Tensor:
    """y_r = the sum."""
    return torch.stack([xs.sum(0)] * len(xs))


MAPS = {
    "gather": Map(fzero.all_gather, gathered, "scatter"),
    "scatter": Map(fzero.reduce_scatter, scattered, "gather"),
    "reduce": Map(fzero.all_reduce, reduced, "reduce"),
}


def simulated(fn: Callable[..., Tensor], *stacked: Tensor) -> Tensor:
    """`fn` on as many virtual ranks as the tensors have rows."""
    return fzero.simulate(fn, world_size=len(stacked[0]))(*stacked)
