"""Local updates in one process: R plain models, a plain outer optimizer over their anchors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[list[Any]], torch.optim.Optimizer]


def sgd_of_diloco(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.7, momentum=0.9, nesterov=True)


class Replicas:
    """R copies of a module that train apart, and anchors: nothing of fzero is in here.

    out: called before each outer update, gives the replicas that are left out of its mean.
    """

    def __init__(
        self,
        module: nn.Module,
        count: int,
        *,
        every: int,
        inner: Make,
        outer: Make = sgd_of_diloco,
        max_norm: float | None = None,
    ) -> None:
        self.modules = [copy.deepcopy(module) for _ in range(count)]
        self.inner = [inner(list(one.parameters())) for one in self.modules]
        self.anchors = [p.detach().clone().requires_grad_() for p in module.parameters()]
        self.outer = outer(list(self.anchors))
        self.every, self.max_norm, self.updates = every, max_norm, 0

    def update(self, losses: Sequence[Callable[[nn.Module], Tensor]], out: Sequence[int] = ()):
        """One update of each replica from its loss, and the outer one if it is due."""
        for module, optimizer, loss in zip(self.modules, self.inner, losses, strict=True):
            optimizer.zero_grad()
            loss(module).backward()
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)
            optimizer.step()
        self.updates += 1
        if self.updates % self.every == 0:
            self.meet([i for i in range(len(self.modules)) if i not in out])

    @torch.no_grad()
    def meet(self, who: Sequence[int]) -> None:
        """The outer update, from the mean move of some replicas."""
        all_params = [list(one.parameters()) for one in self.modules]
        for k, anchor in enumerate(self.anchors):
            moved = [anchor.double() - all_params[i][k].double() for i in who]
            anchor.grad = (sum(moved) / len(who)).to(anchor.dtype)
        self.outer.step()
        for params in all_params:
            for p, anchor in zip(params, self.anchors, strict=True):
                p.copy_(anchor)
