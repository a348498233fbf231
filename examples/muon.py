"""Muon for the matrices of a sharded model, Adam for all else: each parameter has an owner.

    python examples/muon.py
    torchrun --nproc-per-node 2 examples/muon.py --stage 2

A matrix optimizer cannot step a part of a matrix, which `needs="leaf"` says of this one. So each
parameter is sent to the rank that owns it, which steps it and sends the new parts back.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine

BATCH, STEPS, LR, TOLERANCE = 12, 60, 0.02, 1e-12
WIDTHS = (6, 16, 16, 16, 1)

torch.manual_seed(0)
layers = [[nn.Linear(n, m), nn.Tanh()] for n, m in pairwise(WIDTHS)]
model = nn.Sequential(*[part for layer in layers for part in layer][:-1]).double()
x = torch.randn(STEPS, BATCH, WIDTHS[0], dtype=torch.float64)
y = x[..., :1] * x[..., 1:2] + x[..., 2:3].sin()


class MuonAndAdam(torch.optim.Adam):
    """Matrices by Muon (Jordan et al., 2024), in a param group of their own; the rest by Adam."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        given = list(params)
        muon = {"params": [p for p in given if p.ndim == 2], "muon": True}
        adam = {"params": [p for p in given if p.ndim != 2], "muon": False}
        super().__init__([muon, adam], lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update: Adam's own step, with the group of the matrices put aside."""
        groups = self.param_groups
        for p in (p for group in groups if group["muon"] for p in group["params"]):
            held = self.state[p].setdefault("momentum", torch.zeros_like(p))
            held.mul_(0.9).add_(p.grad)
            p.sub_(groups[0]["lr"] * straight(held))
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step(closure)
        self.param_groups = groups


def straight(m: Tensor) -> Tensor:
    """U V^T for m = U S V^T, nearly: a few steps of Newton and Schulz."""
    u = m / (m.norm() + 1e-7)
    for _ in range(5):
        u = 1.5 * u - 0.5 * u @ u.mT @ u
    return u


def plain_training() -> dict[str, Tensor]:
    """Return the parameters after the same steps of plain PyTorch on whole batches."""
    plain = copy.deepcopy(model)
    optimizer = MuonAndAdam(plain.parameters(), lr=LR)
    for xs, ys in zip(x, y, strict=True):
        optimizer.zero_grad()
        (plain(xs) - ys).square().mean().backward()
        optimizer.step()
    return plain.state_dict()


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    stage, axis = parser.parse_args().stage, fzero.world()
    say = print if axis.rank == 0 else lambda *_: None

    wanted = plain_training()
    optimizer = MuonAndAdam(model.parameters(), lr=LR)
    engine = Engine(model, fzero.optim.from_torch(optimizer, needs="leaf"), stage=stage)
    for xs, ys in zip(x, y, strict=True):
        loss = (engine(xs[axis.rank :: axis.size]) - ys[axis.rank :: axis.size]).square().mean()
        loss.backward()
        engine.step()
    held = fzero.state_bytes(engine.state)["optimizer"]
    say(f"{held:,} bytes of the optimizer's states on each rank")
    found = engine.full_state_dict()
    off = max((found[name] - wanted[name]).abs().max().item() for name in wanted)
    say(f"check: {STEPS} updates on {axis.size} rank(s) are those of plain PyTorch to {off:.1e}")
    if off > TOLERANCE:
        raise SystemExit("a claim is not so")


if __name__ == "__main__":
    main()
