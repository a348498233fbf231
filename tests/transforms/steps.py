"""Steps over trees of tensors, and how to run them on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.oracle import square_loss

LR = 2.0**-8


def sgd() -> fzero.optim.Optimizer:
    """Exact on integers: dyadic numbers only."""
    return fzero.optim.sgd(LR, momentum=0.5)


def torch_sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    """The same of torch."""
    return torch.optim.SGD(params or [torch.ones(1)], LR, momentum=0.5)


def mean_loss(params: Any, xs: Tensor) -> Tensor:
    """The mean over the examples xs [n] of `square_loss`."""
    return torch.stack([square_loss(params, x) for x in xs.unbind()]).sum() / len(xs)


def one_backward(state: Any, xs: Tensor) -> Any:
    """One gradient over the whole batch [n], one update."""
    state, loss = fzero.grad_and_reduce(mean_loss, state)(xs)
    return fzero.apply_gradients(state), loss


def many_backwards(state: Any, xs: Tensor) -> Any:
    """A gradient for each example of [n], one update."""
    losses = []
    for x in xs.unbind():
        state, loss = fzero.grad_and_reduce(square_loss, state)(x)
        losses.append(loss)
    return fzero.apply_gradients(state), torch.stack(losses).mean()


def run(
    wrap: Callable[[Any], Any],
    fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    ranks: int,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Train `simulate(shard(wrap(fn)))` on batches [rank, ...]: (full params, state, last aux)."""
    step = fzero.simulate(fzero.shard(wrap(fn), **options), world_size=ranks)
    state, aux = step.init(params, sgd()), None
    for batch in batches:
        state, aux = step(state, batch)
    return fzero.simulate(fzero.full_params, world_size=ranks)(state), state, aux
