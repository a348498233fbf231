"""Lion as a torch.optim optimizer; torch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """p' = (1 - lr weight_decay) p - lr sign(b1 m + (1-b1) g),  m' = b2 m + (1-b2) g.

    The same rule as `fzero.optim.lion`, with param groups for schedulers.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675,
    algorithm 2.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> p.grad = torch.tensor([3.0, -5.0])
        >>> Lion([p], lr=0.25).step()
        >>> p.data
        tensor([0.7500, 1.2500])
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid lr={lr}, betas={betas} or weight_decay={weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            ps = [p for p in group["params"] if p.grad is not None]
            if not ps:
                continue
            gs: list[Any] = [p.grad for p in ps]
            for p in ps:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments = [self.state[p]["exp_avg"] for p in ps]
            first, second = group["betas"]
            steps = torch._foreach_lerp(moments, gs, 1 - first)
            torch._foreach_sign_(steps)
            torch._foreach_mul_(ps, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(ps, steps, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gs, 1 - second)
        return loss
