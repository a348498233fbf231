"""Training by given gradients: torch.optim on whole parameters, and fzero on any ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fzero

STEPS = 4
SHAPES = {"a.weight": (3, 5), "a.bias": (5,), "b": (2, 3, 2), "scale": ()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {path: nn.Parameter(torch.randn(shape).to(dtype)) for path, shape in SHAPES.items()}


def gradients(params: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Multiples of 1/64, so that the mean over three ranks is exact."""
    source = torch.Generator().manual_seed(10 + step)
    drawn = {path: torch.randn(p.shape, generator=source) for path, p in params.items()}
    return {path: ((64 * x).round() / 64).to(params[path].dtype) for path, x in drawn.items()}


def fused_if_it_can(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As fzero does: the kernel that rounds as little as possible, where torch may choose."""
    for group in optimizer.param_groups:
        if group.get("fused", False) is None:
            group["fused"] = True
    return optimizer


def torchs(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], steps: Sequence[int]
) -> None:
    """Step whole parameters by the `gradients` of each step."""
    fused_if_it_can(optimizer)
    for step in steps:
        for p, g in zip(params.values(), gradients(params, step).values(), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


def with_gradients(state: Any, params: Mapping[str, Tensor], step: int) -> Any:
    """The state that holds the `gradients` of a step: rank r has another part of them."""
    share = 2 * (fzero.axis_index() + 1) / (fzero.axis_size() + 1)  # 1 in the mean over ranks

    def loss(held: Any) -> Tensor:
        terms = [(held[path] * g).sum() for path, g in gradients(params, step).items()]
        return share * torch.stack(terms).sum()

    return fzero.grad_and_reduce(loss, state)()[0]


def run(
    optimizer: Any,
    params: Mapping[str, Tensor],
    steps: Sequence[int],
    *,
    ranks: int = 0,
    stage: int = 0,
    donate: bool = False,
    state: Any = None,
) -> tuple[dict[str, Tensor], Any]:
    """Return the full parameters after these steps, and the state: a new one if none is given.

    ranks: how many virtual ones, whose results are stacked; 0 for this process alone.
    """

    def step_of(number: int) -> Any:
        def step_fn(state: Any) -> tuple[Any, None]:
            return fzero.apply_gradients(with_gradients(state, params, number)), None

        step = fzero.shard(step_fn, stage=stage, donate=donate)
        return fzero.simulate(step, world_size=ranks) if ranks else step

    if state is None:
        state = step_of(0).init(params, optimizer)
    for number in steps:
        state, _ = step_of(number)(state)
    full: Any = fzero.full_params
    return (fzero.simulate(full, world_size=ranks) if ranks else full)(state), state
