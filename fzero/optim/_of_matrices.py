"""A torch.optim optimizer of matrices, which steps each matrix of a stack by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fzero.machine.stacks import in_matrices

State = dict[str, Any]


class OfMatrices(torch.optim.Optimizer):
    """Steps every parameter that has a gradient by `step_matrix`; see `fzero.machine.stacks`.

    What is kept of the matrices of a stack is stacked.
    """

    def __init__(self, params: Iterable[Any], batch_dims: int | None, **options: Any) -> None:
        """Take the options of each param group."""
        told = {} if batch_dims is None else {"batch_dims": batch_dims}
        super().__init__(params, {**options, **told})

    @staticmethod
    def step_matrix(state: State, p: Tensor, gradient: Tensor, group: State) -> None:
        """Update one matrix, or a vector, and its state, in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._step(self.state[p], p, p.grad, group)

    def _step(self, state: State, p: Tensor, gradient: Tensor, group: State) -> None:
        count, shape = in_matrices(tuple(p.shape), group.get("batch_dims"))
        if shape == p.shape:
            self.step_matrix(state, p, gradient, group)
            return
        lead, begun = p.shape[: p.ndim - len(shape)], bool(state)
        own = [
            {
                name: x.flatten(0, len(lead) - 1)[i] if isinstance(x, Tensor) else x
                for name, x in state.items()
            }
            for i in range(count)
        ]
        every = zip(own, p.view(-1, *shape), gradient.reshape(-1, *shape), strict=True)
        for one, matrix, g in every:
            self.step_matrix(one, matrix, g, group)
        for name, x in own[0].items() if own else ():
            if not isinstance(x, Tensor):
                state[name] = x
            elif not begun:
                state[name] = torch.stack([one[name] for one in own]).view(*lead, *x.shape)
