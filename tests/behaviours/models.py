"""Losses over any tree of parameters, and a model of training that keeps every gradient.

All numbers are small dyadic fractions, and every gradient is a multiple of 12: sums and means
over 1 to 4 ranks are exact in whatever order, so that comparisons can be bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

import fzero
from fzero.state import NAMESPACE
from tests import strategies
from tests.oracle import mean_gradient, parts, parts_of
from tests.strategies import integers, tensors

LR, MOMENTUM = 2.0**-10, 0.5
RANKS = (1, 2, 3, 4)
MAX_RANKS = 4
SAMPLES = 4  # rows of a batch on each rank: what accumulate splits
KINDS = (torch.float64, torch.float64, torch.float64, torch.float32, torch.int64)

Tree = Any  # a pytree of tensors; position j is its j-th leaf
Uses = tuple[tuple[int, ...], ...]  # [loss][rank] -> bit j says that position j is used

_WEIGHT = integers((3, 5), 1)
RICH: Tree = {
    "layers": [
        [_WEIGHT, integers((), 2), Parameter(integers((2,), 3), requires_grad=False)],
        [integers((7,), 4, torch.float32), integers((0, 4), 5), integers((3,), 6)],
        [integers((2, 2), 7, torch.int64), _WEIGHT],
        [integers((1,), 8)],
    ]
}


def optimizer() -> fzero.optim.Optimizer:
    """Plain momentum with dyadic numbers: exact."""
    return fzero.optim.sgd(LR, momentum=MOMENTUM)


def loss_of(uses: Uses, number: int) -> Callable[[Any, Tensor], Tensor]:
    """Loss `number`: (params, batch [n, positions]) -> scalar, a mean over the n samples.

    What it uses depends on the rank that runs it; it may be nothing. dL/dp is an integer times 12
    for n in (1, 2, 4), different for each element.
    """

    def loss(params: Any, batch: Tensor) -> Tensor:
        return loss_on_rank(params, batch, number, uses[number][fzero.axis_index()])

    return loss


def loss_on_rank(params: Any, batch: Tensor, number: int, used: int) -> Tensor:
    """The same on a rank that uses the positions whose bits are in `used`."""
    total = batch.new_zeros(())
    for position, leaf in enumerate(tensors(params)):
        if not used >> position & 1:
            continue
        ramp = 1 + torch.arange(leaf.numel()).double() % 16
        wide = leaf.double()
        total = total + batch[:, position].mean() * (wide.reshape(-1).flip(0) * ramp).sum()
        if leaf.dtype == torch.float64:  # of fp32 a square would soon have too many digits
            total = total + (number + 1) * (wide * wide).sum() / 2
    return 48 * total


def batches_for(tree: Tree, seed: int) -> Tensor:
    """[ranks, samples, positions]: other data for each rank, small integers."""
    return integers((MAX_RANKS, SAMPLES, len(tensors(tree))), seed, bound=3)


class Naive:
    """Unsharded training that keeps the list of gradients, one process for all ranks."""

    def __init__(self, tree: Tree, uses: Uses, ranks: int) -> None:
        self.params, self.uses, self.ranks = tree, uses, ranks
        self.momentum: Any = None
        self.gradients: list[Any] = []  # pytrees like the parameters, None for frozen leaves
        self.step = self.reductions = 0
        self.waits = False  # whether a gradient is in an open window
        self.learns = any(strategies.learns(leaf) for leaf in tensors(tree))

    def grad(self, number: int, batch: Tensor, *, scale: float = 1.0, window: bool = False) -> None:
        """Append the mean over ranks of dL/dp; `batch` is [ranks, n, positions]."""

        def loss(params: Any, rank: int) -> Tensor:
            return scale * loss_on_rank(params, batch[rank], number, self.uses[number][rank])

        self.gradients.append(mean_gradient(loss, self.params, range(self.ranks)))
        self.waits |= window and self.learns
        self.reductions += not window

    def end_window(self) -> None:
        """Reduce what waits, once."""
        self.reductions += self.waits
        self.waits = False

    def summed(self) -> Any:
        """The sum of all gradients since the last update."""
        return optree.tree_map(lambda *each: sum(each), *self.gradients, namespace=NAMESPACE)

    def update(self) -> None:
        """Momentum on the sum; start a new list."""
        values, build = parts(self.params)
        gradients, _ = parts_of(self.summed(), self.params)
        held = self.momentum or [0.0] * len(values)
        self.momentum = [
            None if gradient is None else MOMENTUM * m + gradient
            for gradient, m in zip(gradients, held, strict=True)
        ]
        moved = zip(values, self.momentum, strict=True)
        self.params = build([p if m is None else p.detach() - LR * m for p, m in moved])
        self.gradients, self.step = [], self.step + 1
        self.reductions, self.waits = 0, False

    def copy(self) -> Naive:
        """The state as a value."""
        new = copy.copy(self)
        new.gradients = list(self.gradients)
        return new


def trees() -> st.SearchStrategy[Tree]:
    """Leaves of any size, stride and role, in layers of any kind, some tied."""
    return strategies.trees(KINDS, learning=True)


def uses_of(tree: Tree) -> st.SearchStrategy[Uses]:
    """Three losses: one over everything, one over a part, one over another part on each rank."""
    everything = 2 ** len(tensors(tree)) - 1
    mask = st.integers(0, everything)
    return st.tuples(
        st.just((everything,) * MAX_RANKS),
        mask.map(lambda used: (used,) * MAX_RANKS),
        st.tuples(*[mask] * MAX_RANKS),
    )
