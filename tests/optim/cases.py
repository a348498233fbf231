"""The optimizers side by side with torch's own, and Lion written out (torch has none)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fzero
from tests.descends import descends
from tests.oracle import Loss, square_loss


def trained(
    params: Any,
    optimizer: Any,
    xs: Tensor,
    *,
    loss: Loss = square_loss,
    state: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Train on xs [steps, ranks], or [steps] in this process alone; return parameters and state.

    Parameters are whole, and both are stacked by rank, if there are ranks. One update for each
    step, if there is anything that learns; `options` are those of `shard`.
    """

    step_fn = descends(loss)
    step: Any = fzero.shard(step_fn, **options)
    full: Any = fzero.full_params
    if xs.ndim > 1:
        step, full = (fzero.simulate(fn, world_size=xs.shape[1]) for fn in (step, full))
    if state is None:
        state = step.init(params, optimizer)
    for x in xs if state.setup.layout.trainable else ():
        state, _ = step(state, x)
    return full(state), state


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, algorithm 2, line by line."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of everything that has a gradient."""
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = b1 * m + (1 - b1) * p.grad
                p -= group["lr"] * (c.sign() + group["weight_decay"] * p)
                self.state[p]["m"] = b2 * m + (1 - b2) * p.grad


class Case(NamedTuple):
    """fzero's optimizer, given how it treats 16-bit parameters; and the reference."""

    ours: Callable[..., fzero.optim.Optimizer]
    theirs: Callable[[list[Tensor]], torch.optim.Optimizer]


CASES = {
    "sgd": Case(
        partial(fzero.optim.sgd, 0.1, weight_decay=0.3),
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.3),
    ),
    "momentum": Case(
        partial(fzero.optim.sgd, 0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": Case(
        partial(fzero.optim.sgd, 0.1, momentum=0.9, nesterov=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adam": Case(partial(fzero.optim.adam, 0.1), partial(torch.optim.Adam, lr=0.1)),
    "adam l2": Case(
        partial(fzero.optim.adam, 0.1, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.3),
        partial(torch.optim.Adam, lr=0.1, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.3),
    ),
    "adamw": Case(partial(fzero.optim.adamw, 0.1), partial(torch.optim.AdamW, lr=0.1)),
    "adamw decayed": Case(
        partial(fzero.optim.adamw, 0.1, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.3),
        partial(torch.optim.AdamW, lr=0.1, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.3),
    ),
    "lion": Case(partial(fzero.optim.lion, 0.1), partial(Lion, lr=0.1)),
    "lion decayed": Case(
        partial(fzero.optim.lion, 0.1, betas=(0.5, 0.8), weight_decay=0.3),
        partial(Lion, lr=0.1, betas=(0.5, 0.8), weight_decay=0.3),
    ),
}
