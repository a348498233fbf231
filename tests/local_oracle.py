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
    delay, mixing: updates from an exchange to its outer update; what a replica keeps of its own.
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
        delay: int = 0,
        mixing: float = 0.0,
    ) -> None:
        self.modules = [copy.deepcopy(module) for _ in range(count)]
        self.inner = [inner(list(one.parameters())) for one in self.modules]
        self.anchors = [p.detach().clone().requires_grad_() for p in module.parameters()]
        self.fragments = fragments or [range(len(self.anchors))]
        self.outer = [outer([self.anchors[k] for k in some]) for some in self.fragments]
        self.every, self.max_norm, self.updates = every, max_norm, 0
        self.delay, self.mixing = delay, mixing
        self.coming: dict[tuple[int, int], list[Tensor]] = {}  # (update, fragment): mean moves

    def update(
        self,
        error: Callable[[nn.Module, Tensor], Tensor],
        batch: Tensor | Sequence[Tensor],
        *,
        out: Sequence[int] = (),
        skipped: Sequence[int] = (),
    ) -> None:
        """One update of each replica by the error of its part, and the outer one if it is due.

        batch: one for each replica, or [ranks, rows, n], of which each has as many ranks.
        out: the replicas that are not in its mean. skipped: those that make no update.
        """
        if isinstance(batch, Tensor):
            batch = [*batch.reshape(len(self.modules), -1, batch.shape[-1])]
        rows = enumerate(zip(self.modules, self.inner, batch, strict=True))
        for module, optimizer, part in (row for number, row in rows if number not in skipped):
            optimizer.zero_grad()
            error(module, part).backward()
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)
            optimizer.step()
        self.updates += 1
        for number in range(len(self.fragments)):
            offset = (number + 1) * self.every // len(self.fragments)
            if self.updates % self.every == offset % self.every:
                self.meet(number, [i for i in range(len(self.modules)) if i not in out])
            if moves := self.coming.pop((self.updates, number), None):
                self.arrive(number, moves)

    @torch.no_grad()
    def meet(self, number: int, who: Sequence[int]) -> None:
        """Note the mean move of some replicas in a fragment, for the outer update."""
        all_params = [list(one.parameters()) for one in self.modules]
        means = []
        for k in self.fragments[number]:
            moved = [self.anchors[k].double() - all_params[i][k].double() for i in who]
            means.append((sum(moved) / len(who)).to(self.anchors[k].dtype))
        self.coming[self.updates + self.delay, number] = means

    @torch.no_grad()
    def arrive(self, number: int, moves: Sequence[Tensor]) -> None:
        """The outer update of a fragment."""
        for k, move in zip(self.fragments[number], moves, strict=True):
            self.anchors[k].grad = move
        self.outer[number].step()
        for module in self.modules:
            params = list(module.parameters())
            for k in self.fragments[number]:
                kept = self.mixing * params[k] if self.mixing else 0.0  # not 0 times a NaN
                params[k].copy_(kept + (1 - self.mixing) * self.anchors[k])
