"""MAML: the gradient of a loss after a step of gradient descent, through sharded parameters.

    python examples/maml.py
    torchrun --nproc-per-node 2 examples/maml.py --stage 3

Finn et al., "Model-Agnostic Meta-Learning", arXiv 1703.03400. A task is a sine wave; the model sees
ten points of it, makes one step of gradient descent, and is asked for ten others.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import fzero

POINTS, TASKS, STEPS = 10, 12, 100
INNER_LR, TOLERANCE = 0.05, 1e-12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
apply, params = fzero.functionalize(model.double())


def draw(random: torch.Generator) -> Tensor:
    """Return TASKS tasks [task, x and y, seen and asked, point, 1]: sine waves."""
    options: Any = {"generator": random, "dtype": torch.float64}
    height, shift = 0.5 + 2 * torch.rand(2, TASKS, 1, 1, 1, **options)
    x = 6 * torch.rand(TASKS, 2, POINTS, 1, **options) - 3
    return torch.stack([x, height * (x + shift).sin()], dim=1)


def error(params: Any, points: Tensor) -> Tensor:
    """Return the mean squared error on points [x and y, point, 1]."""
    x, y = points
    return (apply(params, x) - y).square().mean()


def adapted(params: Any, task: Tensor) -> Any:
    """Return the parameters after one step on the points that are seen."""
    gradient = torch.func.grad(error)(params, task[:, 0])
    return {name: p - INNER_LR * gradient[name] for name, p in params.items()}


def meta_loss(params: Any, tasks: Tensor) -> Tensor:
    """Return the mean error of the adapted parameters on the points that are asked for."""
    after = torch.func.vmap(lambda task: error(adapted(params, task), task[:, 1]))
    return after(tasks).mean()


def step_fn(state: fzero.TrainState, tasks: Tensor) -> tuple[fzero.TrainState, Tensor]:
    """Make one step on this rank's tasks: nothing in it says that parameters are sharded."""
    state, loss = fzero.grad_and_reduce(meta_loss, state)(tasks)
    return fzero.apply_gradients(state), fzero.pmean(loss)


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    stage = parser.parse_args().stage
    axis = fzero.world()
    say = print if axis.rank == 0 else lambda *_: None

    step = fzero.shard(step_fn, stage=stage)
    state = step.init(params, fzero.optim.adam(5e-3))
    random = torch.Generator().manual_seed(0)  # the same on every rank, which takes its share
    for _ in range(STEPS):
        state, _ = step(state, draw(random)[axis.rank :: axis.size])

    tasks, trained = draw(random), fzero.full_params(state)
    before, after = meta_loss(params, tasks).item(), meta_loss(trained, tasks).item()
    say(f"error on new tasks after one step on each: {before:.3f} untrained, {after:.3f} trained")
    if not 3 * after < before:
        raise SystemExit("the model did not learn to learn")

    held, _ = fzero.grad_and_reduce(meta_loss, state)(tasks[axis.rank :: axis.size])
    found, exact = fzero.gradients(held), torch.func.grad(meta_loss)(trained, tasks)
    largest = max(g.abs().max() for g in exact.values())
    off = float(max((found[name] - exact[name]).abs().max() for name in exact) / largest)
    say(f"check: the meta-gradient at stage {stage} on {axis.size} rank(s) is that of one process "
        f"on all tasks to {off:.1e}")  # fmt: skip
    if not off < TOLERANCE:
        raise SystemExit(f"check: more than {TOLERANCE:.0e} off")


if __name__ == "__main__":
    main()
