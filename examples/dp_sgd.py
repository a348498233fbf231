"""DP-SGD: the gradient of every sample is clipped, noise is added, then the ranks are averaged.

    python examples/dp_sgd.py
    torchrun --nproc-per-node 2 examples/dp_sgd.py --stage 2

Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133. This shows its arithmetic
only: a private run also draws its batches at random, its noise from a generator that nobody can
predict, and keeps account of what it has revealed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

SAMPLES, FEATURES, STEPS, CHUNK = 60, 4, 30, 15
CLIP, NOISE, LR = 1.0, 0.5, 0.5  # the sum over a batch gets noise of deviation NOISE x CLIP
TOLERANCE = 1e-12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2)).double()
apply, params = fzero.functionalize(model)
x = torch.randn(STEPS + 4, SAMPLES, FEATURES, dtype=torch.float64)  # the last 4 are held out
y = (2 * x[..., 0] - x[..., 1] > 0).long()


def clipped_sum(params: Any, x: Tensor, y: Tensor) -> Any:
    """sum_i g_i min(1, CLIP / |g_i|), g_i the gradient of sample i by all parameters."""
    one = torch.func.grad(lambda params, x, y: F.cross_entropy(apply(params, x), y))
    each = torch.func.vmap(one, in_dims=(None, 0, 0))(params, x, y)
    norm = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
    factor = (CLIP / norm).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factor, g) for name, g in each.items()}


def noise(random: torch.Generator, ranks: int) -> Any:
    """Return one rank's share: the noise of all ranks together has deviation NOISE x CLIP."""
    draws = {name: torch.randn(p.shape, generator=random) for name, p in params.items()}
    return {name: NOISE * CLIP / ranks**0.5 * draw.double() for name, draw in draws.items()}


@fzero.coalesce  # all that is added inside crosses the ranks once
def step_fn(state: fzero.TrainState, x: Tensor, y: Tensor, random: torch.Generator) -> Any:
    """Make one step from this rank's samples, CHUNK of them at a time."""
    whole = fzero.full_params(state)
    sums = [clipped_sum(whole, *part) for part in zip(x.split(CHUNK), y.split(CHUNK), strict=True)]
    for total in [*sums, noise(random, fzero.world().size)]:
        mine = {name: value / len(x) for name, value in total.items()}
        state = fzero.add_gradients(state, mine)  # the mean over ranks is taken when it crosses
    return fzero.apply_gradients(state), None


def loop_over_samples(randoms: list[torch.Generator]) -> None:
    """Train `model` in plain PyTorch: one process, all samples, one backward for each."""
    for xs, ys in zip(x[:STEPS], y[:STEPS], strict=True):
        draws = [noise(random, len(randoms)) for random in randoms]
        total = [sum(draw[name] for draw in draws) for name in params]
        for sample, label in zip(xs, ys, strict=True):
            loss = F.cross_entropy(model(sample), label)
            grads = torch.autograd.grad(loss, [*model.parameters()])
            scale = min(1.0, CLIP / torch.cat([g.flatten() for g in grads]).norm().item())
            total = [t + scale * g for t, g in zip(total, grads, strict=True)]
        with torch.no_grad():
            for p, t in zip(model.parameters(), total, strict=True):
                p -= LR * t / SAMPLES


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    step, axis = fzero.shard(step_fn, stage=parser.parse_args().stage), fzero.world()
    say = print if axis.rank == 0 else lambda *_: None
    randoms = [torch.Generator().manual_seed(rank) for rank in range(axis.size)]

    state, mine = step.init(params, fzero.optim.sgd(LR)), slice(axis.rank, None, axis.size)
    for xs, ys in zip(x[:STEPS], y[:STEPS], strict=True):
        state, _ = step(state, xs[mine], ys[mine], randoms[axis.rank])
    found = fzero.full_params(state)
    right = (apply(found, x[STEPS:]).argmax(-1) == y[STEPS:]).double().mean().item()
    say(f"{right:.1%} of held-out samples right")

    loop_over_samples([torch.Generator().manual_seed(rank) for rank in range(axis.size)])
    off = max((found[name] - p).abs().max().item() for name, p in model.named_parameters())
    say(
        f"check: {STEPS} steps on {axis.size} rank(s) are those of a loop over samples to {off:.1e}"
    )
    if not (right > 0.9 and off < TOLERANCE):
        raise SystemExit("not learned, or not the same")


if __name__ == "__main__":
    main()
