"""A moving average of sharded parameters: each rank averages its own shard, nothing is gathered.

    python examples/ema.py
    torchrun --nproc-per-node 2 examples/ema.py --stage 3

The average is a second train state: it can be evaluated, saved, and loaded like any other.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fzero
from fzero.state import NAMESPACE

FEATURES, BATCH, STEPS = 8, 12, 200
LR, DECAY, TOLERANCE = 0.3, 0.97, 1e-12

torch.manual_seed(0)
model = nn.Linear(FEATURES, 3).double()
apply, params = fzero.functionalize(model)
x = torch.randn(STEPS, BATCH, FEATURES, dtype=torch.float64)
truth = torch.randn(FEATURES, 3, dtype=torch.float64)
y = x @ truth + 2 * torch.randn(STEPS, BATCH, 3, dtype=torch.float64)  # very noisy


def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (apply(params, x) - y).square().mean()


def averaged(ema: fzero.TrainState, state: fzero.TrainState) -> fzero.TrainState:
    """ema' = DECAY ema + (1 - DECAY) p, element by element, of what this rank holds."""
    own = optree.tree_map(
        lambda old, new: old.lerp(new, 1 - DECAY), ema.params, state.params, namespace=NAMESPACE
    )
    return ema.replace(params=own)


def step_fn(states: Any, x: Tensor, y: Tensor) -> Any:
    """Make a step of gradient descent, then let the average follow."""
    model, _ = fzero.grad_and_reduce(loss, states["model"])(x, y)
    model = fzero.apply_gradients(model)
    with fzero.count_collectives() as log:
        ema = averaged(states["ema"], model)
    return {"model": model, "ema": ema}, sum(log.counts().values())


def plain_training() -> tuple[Any, Any]:
    """Return model and average after the same steps of plain PyTorch on whole batches."""
    plain = copy.deepcopy(model)
    ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    ema.update_parameters(plain)  # the first one copies
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for xs, ys in zip(x, y, strict=True):
        optimizer.zero_grad()
        (plain(xs) - ys).square().mean().backward()
        optimizer.step()
        ema.update_parameters(plain)
    return dict(plain.named_parameters()), dict(ema.module.named_parameters())


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    stage, axis = parser.parse_args().stage, fzero.world()
    say = print if axis.rank == 0 else lambda *_: None

    step = fzero.shard(step_fn, stage={"model": stage, "ema": stage})
    optimizers = {"model": fzero.optim.sgd(LR), "ema": fzero.optim.NoOptimizer()}
    states, collectives = step.init({"model": params, "ema": params}, optimizers), 0
    for xs, ys in zip(x, y, strict=True):
        states, count = step(states, xs[axis.rank :: axis.size], ys[axis.rank :: axis.size])
        collectives += count
    held = fzero.state_bytes(states["ema"])["total"]
    say(f"{collectives} collectives in {STEPS} updates of the average; {held} bytes on each rank")

    found, off = fzero.full_params(states), 0.0
    far = {name: (p["weight"].T - truth).norm().item() for name, p in found.items()}
    say(f"distance to the truth: {far['model']:.3f} the model, {far['ema']:.3f} its average")
    for mine, plain in zip((found["model"], found["ema"]), plain_training(), strict=True):
        off = max(off, *((mine[name] - plain[name]).abs().max().item() for name in plain))
    say(f"check: model and average on {axis.size} rank(s) are those of torch.optim.swa_utils "
        f"to {off:.1e}")  # fmt: skip
    if collectives or not (1.5 * far["ema"] < far["model"] and off < TOLERANCE):
        raise SystemExit("a claim is not so")


if __name__ == "__main__":
    main()
