"""A loss with a derivative in forward mode: a network that learns a differential equation.

    python examples/jvp_loss.py
    torchrun --nproc-per-node 2 examples/jvp_loss.py --stage 3

The equation is u' = u (1 - u) with u(0) = 1/2, of which the solution is the sigmoid. The loss never
sees the sigmoid, only what the equation says (Raissi et al., "Physics Informed Deep Learning",
arXiv 1711.10561). u' comes from `torch.func.jvp`, and is differentiated by the sharded parameters.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fzero

POINTS, STEPS, LR, TOLERANCE = 36, 120, 1e-2, 1e-10

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
apply, params = fzero.functionalize(model.double())
x = 8 * torch.rand(STEPS, POINTS, 1, dtype=torch.float64) - 4


def residual(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return by how much u misses the equation at the points x [n, 1], and its start at 0."""
    value, slope = torch.func.jvp(u, (x,), (torch.ones_like(x),))  # u(x) and u'(x), in one pass
    start = u(torch.zeros_like(x[:1])) - 0.5
    return (slope - value * (1 - value)).square().mean() + start.square().mean()


def loss(params: Any, x: Tensor) -> Tensor:
    """Return the residual of the network."""
    return residual(lambda x: apply(params, x), x)


def step_fn(state: fzero.TrainState, x: Tensor) -> tuple[fzero.TrainState, Tensor]:
    """Make one step on this rank's points."""
    state, value = fzero.grad_and_reduce(loss, state)(x)
    return fzero.apply_gradients(state), fzero.pmean(value)


def plain_training() -> Any:
    """Return the parameters after the same steps in plain PyTorch: one process, all points.

    Its derivative is written by hand: W3 (1 - b^2) W2 (1 - a^2) W1, a and b the layers of tanh.
    """
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adam(plain.parameters(), lr=LR)
    for points in x:
        a = plain[:2](points)
        b = plain[2:4](a)
        value = plain[4](b)
        slope = (1 - a.square()) * plain[0].weight.T
        slope = ((1 - b.square()) * (slope @ plain[2].weight.T)) @ plain[4].weight.T
        start = plain(torch.zeros_like(points[:1])) - 0.5
        optimizer.zero_grad()
        ((slope - value * (1 - value)).square().mean() + start.square().mean()).backward()
        optimizer.step()
    return dict(plain.named_parameters())


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    stage, axis = parser.parse_args().stage, fzero.world()
    say = print if axis.rank == 0 else lambda *_: None

    step = fzero.shard(step_fn, stage=stage)
    state = step.init(params, fzero.optim.adam(LR))
    for points in x:
        state, _ = step(state, points[axis.rank :: axis.size])

    found, exact = fzero.full_params(state), plain_training()
    grid = torch.linspace(-4, 4, 81, dtype=torch.float64).unsqueeze(1)
    miss = (apply(found, grid) - grid.sigmoid()).abs().max().item()
    say(f"the network is the sigmoid to {miss:.3f} between -4 and 4")
    off = max((found[name] - exact[name]).abs().max().item() for name in exact)
    say(f"check: {STEPS} steps on {axis.size} rank(s) are those of one process, its derivative "
        f"written by hand, to {off:.1e}")  # fmt: skip
    if not (miss < 0.05 and off < TOLERANCE):
        raise SystemExit("not learned, or not the same")


if __name__ == "__main__":
    main()
