"""A model whose training is exact in fp64, so that every stage and world gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import fzero
from tests import oracle
from tests.behaviours.networks import PLACES, mlp, squared_loss
from tests.strategies import integers, tensors

SAMPLES, FEATURES, OUTPUTS, STEPS, PASSES = 12, 4, 3, 3, 2
World = tuple[int, str, bool, int]  # stage, reshard, coalesced, bucket_bytes
WORLDS: list[World] = [
    (stage, reshard, coalesced, size)
    for stage, reshard in PLACES
    for coalesced in (False, True)
    for size in ((1, 2**20) if stage < 3 else (1,))
]


def exact_params() -> dict[str, Any]:
    """Three affine layers side by side, one bias tied, one weight frozen; odd sizes."""
    bias = integers((OUTPUTS,), seed=1)
    layers = [
        {"w": integers((OUTPUTS, FEATURES), seed=2), "b": bias},
        {"w": integers((OUTPUTS, FEATURES), seed=3), "b": bias},
        {"w": Parameter(integers((OUTPUTS, FEATURES), seed=4), requires_grad=False)},
    ]
    return {"layers": layers, "scale": integers((), seed=5), "empty": integers((0, 2), seed=6)}


def exact_loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """12 times the mean over samples of |f(x) - y|^2; f is affine, so p' has few digits."""
    out = params["scale"] - y
    for i, layer in enumerate(params["layers"]):
        out = out + x.roll(i, 1) @ layer["w"].T
        if "b" in layer:
            out = out + layer["b"]
    return 12 * out.square().sum(1).mean() + params["empty"].sum()


def exact_data() -> tuple[Tensor, Tensor]:
    """[steps, passes, samples, ...] of whole numbers: to be split over the ranks."""
    x = integers((STEPS, PASSES, SAMPLES, FEATURES), seed=7, bound=3)
    return x, integers((STEPS, PASSES, SAMPLES, OUTPUTS), seed=8, bound=3)


def rank_rows(x: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's samples of [steps, passes, samples, ...]."""
    return x.chunk(ranks, dim=2)[rank]


def exact_optimizer() -> fzero.optim.Optimizer:
    return fzero.optim.sgd(2.0**-8, momentum=0.5)


def train(
    loss: Callable[..., Tensor],
    params: Any,
    optimizer: Any,
    x: Tensor,
    y: Tensor,
    world: World,
    *,
    donate: bool = False,
) -> Any:
    """`STEPS` updates of `PASSES` passes on this rank's rows; the parameters after them."""
    stage, coalesced, bucket_bytes = world[0], world[2], world[3]
    reshard: Any = world[1]

    def step(state: Any, x: Tensor, y: Tensor) -> tuple[Any, None]:
        for i in range(PASSES):
            state, _ = fzero.grad_and_reduce(loss, state)(x[i], y[i])
        return fzero.apply_gradients(state), None

    sharded = fzero.shard(
        fzero.coalesce(step) if coalesced else step,
        stage=stage,
        reshard_after_forward=reshard,
        bucket_bytes=bucket_bytes,
        donate=donate,
    )
    state = sharded.init(params, optimizer)
    for i in range(STEPS):
        state, _ = sharded(state, x[i], y[i])
    return fzero.full_params(state)


def train_unsharded(
    loss: Callable[..., Tensor], params: Any, torch_optimizer: Callable[..., Any], x: Any, y: Any
) -> list[Tensor]:
    """The same on all samples at once with torch's own optimizer; tied tensors once."""

    def of_all_passes(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        passes = [loss(params, *one) for one in zip(*batch, strict=True)]
        return torch.stack(passes).sum()

    steps = [[batch] for batch in zip(x, y, strict=True)]
    return tensors(oracle.train(of_all_passes, params, steps, torch_optimizer))


def updates(before: Any, after: Any) -> list[Tensor]:
    """p' - p of each leaf: parameters could agree where updates do not."""
    return [b - a.detach() for a, b in zip(tensors(before), tensors(after), strict=True)]


def smooth() -> tuple[Callable[..., Tensor], Any]:
    """An MLP for adamw, whose division and root round."""
    apply, params = fzero.functionalize(mlp(FEATURES, 5, 7, OUTPUTS))
    return squared_loss(apply), params
