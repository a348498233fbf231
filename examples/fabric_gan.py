"""Lightning Fabric, manual optimization: a generator and a discriminator, both sharded.

    torchrun --nproc-per-node 2 examples/fabric_gan.py --stage 3

Made points are to lie on a circle. The training is saved, and goes on from there.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from fzero.integrations.fabric import FzeroStrategy

BATCH, NOISE = 64, 4  # samples of a step on all ranks; numbers that a point is made of
MAX_NORM = 5.0


def make_models() -> tuple[nn.Module, nn.Module]:
    """Return (generator, discriminator), with the same random values on every rank."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
    discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return generator.double(), discriminator.double()


class Gan:
    """Both networks as Fabric has set them up; `step(number)` is one update of each."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, adam = fabric, torch.optim.Adam
        made = [fabric.setup(model, adam(model.parameters(), lr=0.01)) for model in make_models()]
        (self.generator, self.g_optimizer), (self.discriminator, self.d_optimizer) = made

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of (points of the circle, noise)."""
        source = torch.Generator().manual_seed(number)
        angle = 6.2832 * torch.rand(BATCH, 1, generator=source, dtype=torch.float64)
        noise = torch.randn(BATCH, NOISE, generator=source, dtype=torch.float64)
        ranks = slice(self.fabric.global_rank, None, self.fabric.world_size)
        return torch.cat([angle.cos(), angle.sin()], 1)[ranks], noise[ranks]

    def step(self, number: int) -> tuple[float, float]:
        """Update the discriminator by two backwards and one reduction; then the generator."""
        real, noise = self.batch(number)
        with self.fabric.no_backward_sync(self.discriminator):
            on_real = F.softplus(-self.discriminator(real)).mean()
            self.fabric.backward(on_real, model=self.discriminator)
        on_made = F.softplus(self.discriminator(self.generator(noise).detach())).mean()
        self.fabric.backward(on_made, model=self.discriminator)
        self.fabric.clip_gradients(self.discriminator, self.d_optimizer, max_norm=MAX_NORM)
        self.d_optimizer.step()
        loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        self.fabric.backward(loss, model=self.generator)
        self.g_optimizer.step()
        self.g_optimizer.zero_grad()
        self.d_optimizer.zero_grad()  # the generator's loss has reached it
        losses = self.fabric.all_reduce(torch.stack([on_real + on_made, loss]).detach())
        return losses[0].item(), losses[1].item()

    def state(self, number: int) -> dict[str, Any]:
        """Return what a checkpoint has."""
        models = {"generator": self.generator, "discriminator": self.discriminator}
        return {**models, "g": self.g_optimizer, "d": self.d_optimizer, "number": number}


def main() -> None:
    """Train, save, and go on from what was saved; fail if that is not the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fzero-fabric")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # that torchrun has started
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=FzeroStrategy(stage=args.stage))
    fabric.launch()
    gan = Gan(fabric)
    losses = [gan.step(number) for number in range(20)]
    fabric.save(args.folder, gan.state(20))
    losses += [gan.step(number) for number in range(20, 40)]
    again = Gan(fabric)
    state = again.state(0)
    fabric.load(args.folder, state)
    resumed = [again.step(number) for number in range(state["number"], 40)]
    fabric.print(f"{fabric.world_size} rank(s), stage {args.stage}: losses {losses[0]} -> "
                 f"{losses[-1]}; {resumed[-1]} when resumed")  # fmt: skip
    if resumed != losses[20:]:
        raise SystemExit("another training when resumed")


if __name__ == "__main__":
    main()
