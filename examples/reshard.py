"""One training on 4 ranks, then on 2, then on 3, each at another stage: the losses go on.

    python examples/reshard.py    # all three on virtual ranks of this process
    torchrun --nproc-per-node 4 examples/reshard.py --stage 3 --folder run
    torchrun --nproc-per-node 2 examples/reshard.py --stage 1 --folder run
    torchrun --nproc-per-node 3 examples/reshard.py --stage 2 --folder run

A checkpoint has whole parameters, not shards, so it does not matter who wrote it and who reads it.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fzero

RUNS = ((4, 3), (2, 1), (3, 2))  # ranks and stage of each run
BATCH, STEPS, LR, TOLERANCE = 48, 8, 2e-2, 1e-12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
apply, params = fzero.functionalize(model)
x = torch.randn(len(RUNS) * STEPS, BATCH, 5, dtype=torch.float64)


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    """Return how far the outputs are from what is to be learned of `x`."""
    return (output - x[..., :3].sin()).square().mean()


def step_fn(state: fzero.TrainState, x: Tensor) -> tuple[fzero.TrainState, Tensor]:
    """Make one step on this rank's rows."""
    state, loss = fzero.grad_and_reduce(lambda p, x: loss_of(apply(p, x), x), state)(x)
    return fzero.apply_gradients(state), fzero.pmean(loss)


def run(step: Any, mine: Callable[[Tensor], Tensor], folder: Path) -> list[float]:
    """Go on from `folder` for STEPS steps, save there; return all losses since the beginning."""
    state, losses = step.init(params, fzero.optim.adamw(LR)), []
    if folder.exists():
        state, extra = fzero.checkpoint.load_with_extra(folder, state)
        losses = extra["losses"]
    for batch in x[len(losses) :][:STEPS]:
        state, loss = step(state, mine(batch))
        losses.append(loss.flatten()[0].item())  # the same number on every rank
    fzero.checkpoint.save(folder, state, extra={"losses": losses})
    return losses


def plain_losses() -> list[float]:
    """Return the losses of plain PyTorch: one process, whole batches, never interrupted."""
    plain, losses = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    for batch in x:
        optimizer.zero_grad()
        loss = loss_of(plain(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="of the checkpoint, under torchrun")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="under torchrun")
    args, axis = parser.parse_args(), fzero.world()
    say = print if axis.rank == 0 else lambda *_: None

    losses: list[float] = []
    if args.folder is not None:
        step = fzero.shard(step_fn, stage=args.stage)
        losses = run(step, lambda batch: batch[axis.rank :: axis.size], args.folder)
    elif axis.size > 1:
        parser.error("several ranks: give them a --folder to share")
    else:
        with tempfile.TemporaryDirectory() as folder:
            for n, stage in RUNS:  # the batch of virtual ranks is [rank, row, feature]
                step = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=n)
                losses = run(step, lambda x, n=n: x.unflatten(0, (n, -1)), Path(folder, "run"))
                say(f"{n} ranks, stage {stage}: loss {losses[-STEPS]:.4f} to {losses[-1]:.4f}")

    off = max(abs(a - b) for a, b in zip(losses, plain_losses(), strict=False))
    say(f"check: {len(losses)} losses are those of one process, not interrupted, to {off:.1e}")
    if not off < TOLERANCE:
        raise SystemExit(f"check: more than {TOLERANCE:.0e} off")


if __name__ == "__main__":
    main()
