"""The maps over ranks, as fzero has them and as plain formulas on the stacked ranks."""

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


def exchanged(xs: Tensor) -> Tensor:
    """y_r = concat(chunk r of x_0, of x_1, ..)."""
    chunks = xs.unflatten(1, (len(xs), xs.shape[1] // len(xs)))
    return chunks.transpose(0, 1).flatten(1, 2)


def ring(size: int, step: int = 1) -> list[tuple[int, int]]:
    """The pairs of some steps around the ring."""
    return [(r, (r + step) % size) for r in range(size)]


def ppermute(x: Tensor) -> Tensor:
    """One step around the ring."""
    return fzero.ppermute(x, ring(fzero.axis_size()))


def back(x: Tensor) -> Tensor:
    """One step back."""
    return fzero.ppermute(x, ring(fzero.axis_size(), -1))


back.__name__ = "ppermute"  # what is counted


MAPS = {
    "gather": Map(fzero.all_gather, gathered, "scatter"),
    "scatter": Map(fzero.reduce_scatter, scattered, "gather"),
    "reduce": Map(fzero.all_reduce, reduced, "reduce"),
    "exchange": Map(fzero.all_to_all, exchanged, "exchange"),
    "permute": Map(ppermute, lambda xs: xs.roll(1, 0), "back"),
    "back": Map(back, lambda xs: xs.roll(-1, 0), "permute"),
}


def simulated(fn: Callable[..., Tensor], *stacked: Tensor) -> Tensor:
    """`fn` on as many virtual ranks as the tensors have rows."""
    return fzero.simulate(fn, world_size=len(stacked[0]))(*stacked)
