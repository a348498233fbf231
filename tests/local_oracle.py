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

    fragments: the numbers of the parameters that meet together; default: all of them.
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
        fragments: Sequence[Sequence[int]] = (),
    ) -> None:
        self.modules = [copy.deepcopy(module) for _ in range(count)]
        self.inner = [inner(list(one.parameters())) for one in self.modules]
        self.anchors = [p.detach().clone().requires_grad_() for p in module.parameters()]
        self.fragments = fragments or [range(len(self.anchors))]
        self.outer = [outer([self.anchors[k] for k in some]) for some in self.fragments]
        self.every, self.max_norm, self.updates = every, max_norm, 0

    def update(
        self,
        losses: Sequence[Callable[[nn.Module], Tensor]],
        *,
        out: Sequence[int] = (),
        skipped: Sequence[int] = (),
    ) -> None:
        """One update of each replica from its loss, and the outer one if it is due.

        out: the replicas that are not in its mean. skipped: those that make no update.
        """
        rows = enumerate(zip(self.modules, self.inner, losses, strict=True))
        for module, optimizer, loss in (row for number, row in rows if number not in skipped):
            optimizer.zero_grad()
            loss(module).backward()
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)
            optimizer.step()
        self.updates += 1
        for number in range(len(self.fragments)):
            offset = (number + 1) * self.every // len(self.fragments)
            if self.updates % self.every == offset % self.every:
                self.meet(number, [i for i in range(len(self.modules)) if i not in out])

    @torch.no_grad()
    def meet(self, number: int, who: Sequence[int]) -> None:
        """The outer update of a fragment, from the mean move of some replicas."""
        all_params = [list(one.parameters()) for one in self.modules]
        for k in self.fragments[number]:
            anchor = self.anchors[k]
            moved = [anchor.double() - all_params[i][k].double() for i in who]
            anchor.grad = (sum(moved) / len(who)).to(anchor.dtype)
        self.outer[number].step()
        for params in all_params:
            for k in self.fragments[number]:
                params[k].copy_(self.anchors[k])
