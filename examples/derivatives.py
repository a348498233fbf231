"""Derivatives in objectives, by sharded parameters: MeanFlow, score matching, a PINN, sharpness.

    python examples/derivatives.py
    torchrun --nproc-per-node 4 examples/derivatives.py --stage 3

Each loss holds a derivative of the network by its inputs, and is differentiated by the parameters,
which may lie in shards: a loss is a pure function, so `torch.func` composes with it. Then H v, the
second derivative by the parameters themselves, finds the sharpest direction of each loss.

Geng et al., "Mean Flows for One-step Generative Modeling", arXiv 2505.13447; Song et al., "Sliced
Score Matching", arXiv 1905.07088; Raissi et al., "Physics Informed Deep Learning", 1711.10561.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp

import fzero

ROWS, STEPS, TURNS, LR = 96, 30, 8, 3e-3
Params = dict[str, Tensor]
Loss = Callable[..., Tensor]  # (params, rows) -> the mean over the rows

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
WIDE = torch.float32 if DEVICE.type == "mps" else torch.float64  # MPS has no float64
TOLERANCE = 1e-9 if WIDE.itemsize == 8 else 1e-3


def network(inputs: int, outputs: int) -> nn.Module:
    """Return a small network that is smooth: it is differentiated twice."""
    layers = nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outputs)
    return nn.Sequential(*layers)


class MeanFlow(nn.Module):
    """u(z, r, t), the mean velocity from time r to time t."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(4, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """Return u at points z [n, 2] and times r, t [n, 1]."""
        return self.net(torch.cat([z, r, t], dim=1))


def mean_flow(u: Callable[..., Tensor], rows: Tensor) -> Tensor:
    """|u - (v - (t - r) du/dt)|^2, the target without gradient; rows: data, noise and two times.

    du/dt is the total derivative along the path: that of z is v, of r 0, of t 1.
    """
    data, noise, times = rows.split(2, dim=1)
    r, t = times.sort(dim=1).values.split(1, dim=1)
    z, v = (1 - t) * data + t * noise, noise - data
    mean, slope = jvp(u, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    return (mean - (v - (t - r) * slope).detach()).square().sum(1).mean()


def score_matching(score: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """v . ds/dx v + |s|^2 / 2: the trace of the Jacobian by Hutchinson; rows: points and signs v.

    The gradient goes through the derivative: d/d(parameters) of d/dx.
    """
    x, v = rows[:, :2], rows[:, 2:4].sign()
    s, along = jvp(score, (x,), (v,))
    return ((v * along).sum(1) + s.square().sum(1) / 2).mean()


def pinn(u: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """u'' + u = 0 with u(0) = 0 and u'(0) = 1, of which the solution is the sine."""

    def slope(x: Tensor) -> Tensor:
        return jvp(u, (x,), (torch.ones_like(x),))[1]

    x = 2 * rows[:, :1]
    bend = jvp(slope, (x,), (torch.ones_like(x),))[1]
    start = torch.zeros_like(x[:1])
    at_0 = u(start).square() + (slope(start) - 1).square()
    return (bend + u(x)).square().mean() + at_0.mean()


OBJECTIVES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "MeanFlow": (MeanFlow, mean_flow),
    "score matching": (lambda: network(2, 2), score_matching),
    "PINN": (lambda: network(1, 1), pinn),
}


def times(loss: Loss, v: Params) -> Loss:
    """Return the loss of which the gradient is H v, H the Hessian of `loss`: grad(loss) . v."""

    def along_v(params: Any, rows: Tensor) -> Tensor:
        slope = grad(loss)(params, rows)
        return torch.stack([(slope[name] * v[name]).sum() for name in v]).sum()

    return along_v


def sharpest(hessian_times: Callable[[Params], Params], params: Params) -> Tensor:
    """Return |H v| of v after TURNS turns of v <- H v / |H v|: the largest curvature is near."""
    v, size = {name: torch.ones_like(p) for name, p in params.items()}, torch.ones(())
    for _ in range(TURNS):
        size = torch.stack([each.square().sum() for each in v.values()]).sum().sqrt()
        v = hessian_times({name: each / size for name, each in v.items()})
    return torch.stack([each.square().sum() for each in v.values()]).sum().sqrt()


def sharded(loss: Loss, params: Params, batches: Tensor, stage: int) -> tuple[Params, Tensor]:
    """Train on the ranks that there are; return the parameters and the largest curvature."""
    axis = fzero.world()

    def step_fn(state: fzero.TrainState, rows: Tensor) -> tuple[fzero.TrainState, Tensor]:
        state, value = fzero.grad_and_reduce(loss, state)(rows)
        return fzero.apply_gradients(state), value

    def curvature(state: fzero.TrainState, rows: Tensor) -> tuple[fzero.TrainState, Tensor]:
        def hessian_times(v: Params) -> Params:
            curved, _ = fzero.grad_and_reduce(times(loss, v), state)(rows)
            return fzero.full_gradients(curved)

        return state, sharpest(hessian_times, params)

    step = fzero.shard(step_fn, stage=stage)
    state = step.init(params, fzero.optim.adam(LR))
    for batch in batches:
        state, _ = step(state, batch[axis.rank :: axis.size])
    state, top = fzero.shard(curvature, stage=stage)(state, batches[0][axis.rank :: axis.size])
    return fzero.full_params(state), top


def one_process(loss: Loss, params: Params, batches: Tensor) -> tuple[Params, Tensor]:
    """Return the same of plain PyTorch: one process, whole batches."""
    plain = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.Adam(plain.values(), lr=LR)
    for batch in batches:
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()
    found = {name: p.detach() for name, p in plain.items()}
    return found, sharpest(lambda v: grad(times(loss, v))(found, batches[0]), found)


def main() -> None:
    """Train by each objective, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    stage, axis = parser.parse_args().stage, fzero.world()
    if ROWS % axis.size:
        parser.error(f"{ROWS} rows are not shared evenly by {axis.size} ranks")
    say = print if axis.rank == 0 else lambda *_: None

    worst = 0.0
    for name, (make, objective) in OBJECTIVES.items():
        torch.manual_seed(0)
        apply, params = fzero.functionalize(make().to(DEVICE, WIDE))
        batches = torch.randn(STEPS, ROWS, 6, dtype=torch.float64).to(DEVICE, WIDE)
        batches[..., 4:] = batches[..., 4:].sigmoid()  # times between 0 and 1

        def loss(p: Any, rows: Tensor, apply: Any = apply, objective: Any = objective) -> Tensor:
            return objective(lambda *x: apply(p, *x), rows)

        found, top = sharded(loss, params, batches, stage)
        exact, exact_top = one_process(loss, params, batches)
        off = max((found[path] - p).abs().max().item() for path, p in exact.items())
        off_top = abs(top - exact_top).item() / exact_top.item()
        say(f"{name:14}  loss {loss(params, batches[0]):8.4f} to {loss(found, batches[0]):8.4f}; "
            f"curvature {top:8.3f}; off {off:.1e}, {off_top:.1e}")  # fmt: skip
        if not loss(found, batches[0]) < loss(params, batches[0]):
            raise SystemExit(f"{name}: not learned")
        worst = max(worst, off, off_top)
    say(f"check: {STEPS} steps by each and its H v on {axis.size} rank(s) are those of one process"
        f" to {worst:.1e}")  # fmt: skip
    if not worst < TOLERANCE:
        raise SystemExit("not the same")


if __name__ == "__main__":
    main()
