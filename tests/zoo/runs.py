"""Runs of a family for `fzero.diff`: the same examples over any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

import fzero
from tests.zoo.family import Family

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fzero.optim.adamw(0.01),
    "sgd": lambda: fzero.optim.sgd(0.1, momentum=0.9),
    "lion": lambda: fzero.optim.lion(0.001),
    "rmsprop": lambda: fzero.optim.from_torch(functools.partial(torch.optim.RMSprop, lr=0.01)),
}


def run_of(
    family: Family,
    stage: int,
    world_size: int,
    *,
    model: Callable[[nn.Module], Any] = lambda module: module,
    loss: Callable[[Any, Any], Tensor] | None = None,
    seed: int = 0,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32,
    calls: int = 1,
    examples: int = 8,
) -> fzero.tools.Run:
    """A training of the family; `model` may change the module, `loss` is another one."""
    module = model(family.model(seed).to(dtype))
    apply, params = fzero.functionalize(module)
    loss = loss or family.loss

    def loss_of(p: Any, batch: Any) -> Tensor:
        return loss(functools.partial(apply, p), batch)

    def step(state: Any, batch: Any) -> Any:
        state, value = fzero.grad_and_reduce(loss_of, state)(batch)
        return fzero.apply_gradients(state), value

    def by_rank(x: Tensor) -> Tensor:
        x = x.to(dtype) if x.is_floating_point() else x
        return x.view(world_size, -1, *x.shape[1:])

    batches = [family.examples(1000 * seed + i, examples) for i in range(calls)]
    return fzero.tools.Run(
        step=fzero.shard(step, stage=stage),
        params=params,
        optimizer=OPTIMIZERS[optimizer](),
        batches=[optree.tree_map(by_rank, one) for one in batches],
        world_size=world_size,
    )
