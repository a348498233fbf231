"""Parameters, gradients and flats: what a core would hold, to run an optimizer by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fzero.optim import Piece, TorchOptimizer, TorchState
from fzero.state import Leaf

STEPS = 4
SHAPES = {"a.weight": (3, 5), "a.bias": (5,), "b": (2, 3, 2), "scale": ()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {path: nn.Parameter(torch.randn(shape).to(dtype)) for path, shape in SHAPES.items()}


def gradients(params: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    torch.manual_seed(10 + step)
    return {path: torch.randn(p.shape).to(p.dtype) for path, p in params.items()}


def fused_if_it_can(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As fzero does: the kernel that rounds as little as possible, where torch may choose."""
    for group in optimizer.param_groups:
        if group.get("fused", False) is None:
            group["fused"] = True
    return optimizer


def torchs(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], steps: Sequence[int]
) -> None:
    fused_if_it_can(optimizer)
    for step in steps:
        for p, g in zip(params.values(), gradients(params, step).values(), strict=True):
            p.grad = g
        optimizer.step()


class Flats(NamedTuple):
    """Leaves as flats: with `init` and `advance` of an optimizer, what a core would hold."""

    params: list[Tensor]
    pieces: list[Piece]

    def grads(self, named: dict[str, Tensor]) -> list[Tensor]:
        """Gradients by path, laid out as the parameters are."""
        found = [torch.zeros_like(p) for p in self.params]
        for index, leaf, start, stop in self.pieces:
            found[index][start:stop] = named[leaf.path].flatten()
        return found

    def named(self, flats: Iterable[Tensor]) -> dict[str, Tensor]:
        """Flats -> leaves by path."""
        flats = list(flats)
        return {
            leaf.path: flats[index][start:stop].view(leaf.shape)
            for index, leaf, start, stop in self.pieces
        }


def leaf_of(path: str, p: Tensor) -> Leaf:
    return Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)


def flats_of(*groups: Mapping[str, Tensor]) -> Flats:
    """One flat for each of `groups`."""
    flats, pieces = [], []
    for index, group in enumerate(groups):
        start = 0
        for path, p in group.items():
            pieces.append(Piece(index, leaf_of(path, p), start, start + p.numel()))
            start += p.numel()
        flats.append(torch.cat([p.detach().flatten() for p in group.values()]))
    return Flats(flats, pieces)


def run(
    optimizer: TorchOptimizer,
    flats: Flats,
    params: Mapping[str, Tensor],
    steps: Sequence[int],
    *,
    owned: bool = True,
    state: TorchState | None = None,
) -> tuple[dict[str, Tensor], TorchState]:
    held = list(flats.params)
    state = optimizer.init(held, flats.pieces) if state is None else state
    for step in steps:
        grads = flats.grads(gradients(params, step))
        held, state = optimizer.advance(held, grads, state, flats.pieces, owned=owned)
    return flats.named(held), state


def one_each(params: Mapping[str, Tensor]) -> Flats:
    """As one rank has them: every leaf is a flat."""
    return flats_of(*({path: p} for path, p in params.items()))


def cut(flats: Flats, ranks: int, shard: int) -> list[Flats]:
    """The flats with padding, as each of several ranks has them."""
    found = []
    for rank in range(ranks):
        low, params, pieces = rank * shard, [], []
        for index, flat in enumerate(flats.params):
            whole = torch.cat([flat, flat.new_zeros(ranks * shard - flat.numel())])
            params.append(whole[low : low + shard].clone())
            for piece in flats.pieces:
                start, stop = max(piece.start - low, 0), min(piece.stop - low, shard)
                if piece.index == index and start < stop:
                    pieces.append(Piece(index, piece.leaf, start, stop))
        found.append(Flats(params, pieces))
    return found
