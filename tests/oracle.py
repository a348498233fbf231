"""The unsharded reference: what W ranks must compute, computed without fzero's machine.

    mean_gradient   (1/W) sum_r dL(p, batch_r)/dp by plain autograd, tied leaves once
    train           k steps of a torch.optim optimizer on that, with fp32 masters of 16-bit leaves

Integer-valued batches, and losses whose gradients are multiples of 12, make every sum and mean
over 1 to 4 ranks exact, so that comparisons can be bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.state import NAMESPACE
from tests.strategies import learns, tensors

Loss = Callable[[Any, Any], Tensor]  # (params, batch) -> scalar
LOW = (torch.bfloat16, torch.float16)


def linear_loss(params: Any, x: Tensor) -> Tensor:
    """12 x sum_ij (1 + j mod 3) p_ij: every gradient is a multiple of 12, so means are exact."""
    total = x.new_zeros(())
    for leaf in tensors(params):
        ramp = 1 + torch.arange(leaf.numel()).remainder(3).reshape(leaf.shape)
        total = total + (ramp.to(x.dtype) * leaf.to(x.dtype)).sum()
    return 12 * x * total


def square_loss(params: Any, x: Tensor) -> Tensor:
    """`linear_loss` + 6 sum p^2: dL/dp = 12 (ramp x + p)."""
    squares = [(leaf.to(x.dtype) ** 2).sum() for leaf in tensors(params)]
    return linear_loss(params, x) + 6 * sum(squares, x.new_zeros(()))


def mean_gradient(loss: Loss, params: Any, batches: Sequence[Any]) -> Any:
    """The gradient of the mean loss in the structure of `params`; None for frozen leaves."""
    values, build = parts(params)
    own = [value.detach().clone().requires_grad_(learns(value)) for value in values]
    seats = [value for value in own if value.requires_grad]
    total = torch.stack([loss(build(own), batch) for batch in batches]).sum()
    found = [torch.zeros_like(seat) for seat in seats]
    if total.requires_grad:
        found = torch.autograd.grad(total, seats, allow_unused=True, materialize_grads=True)
    rest = iter(found)
    return build([next(rest) / len(batches) if value.requires_grad else None for value in own])


def as_held(gradients: Any) -> Any:
    """Gradients in the dtypes that they add up in: fp32 for 16-bit ones."""
    return optree.tree_map(
        lambda g: g.float() if g.dtype in LOW else g, gradients, namespace=NAMESPACE
    )


def train(
    loss: Loss,
    params: Any,
    steps: Sequence[Sequence[Any]],
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    max_norm: float | None = None,
) -> Any:
    """The parameters after one update for each of `steps[k][r]`, the batch of rank r at step k.

    `make(parameters)` gives the optimizer; `max_norm` is torch's own clip_grad_norm_.
    """
    values, build = parts(params)
    wide = [
        value.detach().to(torch.float32 if value.dtype in LOW else value.dtype, copy=True)
        for value in values
    ]
    moved = [i for i, value in enumerate(values) if learns(value)]
    optimizer = make([wide[i] for i in moved])
    for batches in steps:
        grads, _ = parts_of(mean_gradient(loss, build(values), batches), params)
        for i in moved:
            wide[i].grad = grads[i].to(wide[i].dtype)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([wide[i] for i in moved], max_norm)
        optimizer.step()
        for i in moved:
            values[i] = wide[i].to(values[i].dtype, copy=True)
    return build(values)


def parts(params: Any) -> tuple[list[Tensor], Callable[[Sequence[Any]], Any]]:
    """Each tensor of a tree once, and how to build the tree of others in their places."""
    return parts_of(params, params)


def parts_of(tree: Any, like: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """What `tree` has at the first position of each tensor of `like`; `like`'s structure."""
    found, treespec = optree.tree_flatten(like, namespace=NAMESPACE)
    order = list({id(leaf): None for leaf in found})
    slots = [order.index(id(leaf)) for leaf in found]
    held = treespec.flatten_up_to(tree)
    values = [held[slots.index(i)] for i in range(len(order))]
    return values, lambda new: optree.tree_unflatten(treespec, [new[i] for i in slots])
