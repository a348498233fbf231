"""A GAN: two engines, two optimizers, two ZeRO stages, one loss through both.

    python examples/gan.py
    torchrun --nproc-per-node 2 examples/gan.py --generator-stage 3 --discriminator-stage 1 --check

The generator learns eight Gaussians on a ring. Its loss runs through the discriminator, whose
engine then has gradients that nobody asked for: `--discard` shows three ways to be rid of them.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine

MODES, RADIUS, SPREAD = 8, 2.0, 0.05
NOISE, WIDTH = 8, 64
FACTOR = 3.0  # that the samples come nearer to the modes, at least
TOLERANCE = 1e-10  # of the check: float64, through a few updates of Adam
CHECKED_STEPS = 20


class Player(Protocol):
    """What a step needs of a network: an `Engine` has it, and so has `Plain`."""

    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """Call the network."""
        ...

    def zero_grad(self) -> None:
        """Throw away its gradients."""
        ...

    def step(self) -> Any:
        """Update it."""
        ...


class Plain:
    """A network and its optimizer without an engine: the reference of `--check`."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def __call__(self, x: Tensor) -> Tensor:
        """Call the network."""
        return self.module(x)

    def zero_grad(self) -> None:
        """Throw away its gradients."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Update it, and clear its gradients as an engine does."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_generator() -> nn.Module:
    """Return a network from noise [n, NOISE] to points [n, 2]."""
    return nn.Sequential(
        nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
    )


def make_discriminator() -> nn.Module:
    """Return a network from points [n, 2] to logits [n, 1]: is it real?"""
    return nn.Sequential(
        nn.Linear(2, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, 1),
    )


def optimizer_of_generator(params: Any) -> torch.optim.Optimizer:
    """Return the generator's optimizer."""
    return torch.optim.Adam(params, lr=1e-3, betas=(0.5, 0.99))


def optimizer_of_discriminator(params: Any) -> torch.optim.Optimizer:
    """Return the discriminator's: of another class, and faster."""
    return torch.optim.AdamW(params, lr=2e-3, betas=(0.5, 0.99), weight_decay=1e-3)


def modes() -> Tensor:
    """Return the centres of the Gaussians: [MODES, 2]."""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)


def draw(count: int, random: torch.Generator) -> Tensor:
    """Return `count` real points."""
    chosen = torch.randint(MODES, (count,), generator=random)
    return modes()[chosen] + SPREAD * torch.randn(count, 2, generator=random)


def distance(points: Tensor) -> Tensor:
    """Return how far each point is from the nearest mode."""
    return torch.cdist(points, modes().to(points)).amin(1)


def make_step(discard: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the step: (g, d, noise, real) -> (loss of g, loss of d)."""

    def step(g: Player, d: Player, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = g(noise)
        # The discriminator: two forwards, one backward. `detach` keeps the generator out of it.
        of_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        of_d.backward()
        d.step()
        # The generator: a backward through both. What it leaves in `d` is not for `d`.
        if discard == "cut":
            points = fake.detach().requires_grad_()
            of_g = F.softplus(-d(points)).mean()
            fake.backward(torch.autograd.grad(of_g, points)[0])  # nothing is left in `d`
            g.step()
            return of_g.detach(), of_d.detach()
        if discard == "freeze":
            d.module.requires_grad_(False)  # no gradient is computed
        of_g = F.softplus(-d(fake)).mean()
        of_g.backward()
        if discard == "freeze":
            d.module.requires_grad_(True)
        else:
            d.zero_grad()  # it was computed and reduced, and is thrown away here
        g.step()
        return of_g.detach(), of_d.detach()

    return step


class Batches:
    """The same noise and real points on every rank, [size, ...] each."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.random = size, torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the whole of the next batch."""
        noise = torch.randn(self.size, NOISE, generator=self.random)
        return noise, draw(self.size, self.random)


def mine(whole: Tensor) -> Tensor:
    """Return this rank's rows."""
    axis = fzero.world()
    return whole[axis.rank :: axis.size]


def make_engines(args: argparse.Namespace, g: nn.Module, d: nn.Module) -> tuple[Engine, Engine]:
    """Return both, each at its own stage with its own optimizer."""
    return (
        Engine(g, optimizer_of_generator, stage=args.generator_stage),
        Engine(d, optimizer_of_discriminator, stage=args.discriminator_stage),
    )


def update_error(args: argparse.Namespace, device: str) -> float:
    """Return the largest difference from plain PyTorch on the whole batch, after some steps."""
    torch.manual_seed(args.seed)
    networks = [make().double().to(device) for make in (make_generator, make_discriminator)]
    engines = make_engines(args, *copy.deepcopy(networks))
    optimizers = [optimizer_of_generator, optimizer_of_discriminator]
    plain = [Plain(n, make(n.parameters())) for n, make in zip(networks, optimizers, strict=True)]
    step, reference = make_step(args.discard), make_step("zero_grad")
    batches = Batches(args.batch, args.seed)
    for _ in range(CHECKED_STEPS):
        noise, real = (x.double().to(device) for x in batches.next())
        step(*engines, mine(noise), mine(real))
        reference(*plain, noise, real)
    worst = 0.0
    for engine, network in zip(engines, networks, strict=True):
        found = engine.full_parameters()
        off = [(found[path] - p).abs().max().item() for path, p in network.named_parameters()]
        worst = max(worst, *off)
    return worst


@torch.no_grad()
def sample(g: Callable[[Tensor], Tensor], device: str) -> Tensor:
    """Return 1,024 points of the generator, the same on every rank."""
    noise = torch.randn(1024, NOISE, generator=torch.Generator().manual_seed(1))
    return g(noise.to(device))


def main() -> None:
    """Train, print, and fail if what was claimed is not so."""
    args = parse()
    axis = fzero.world()
    say = print if axis.rank == 0 else lambda *_, **__: None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    networks = make_generator().to(device), make_discriminator().to(device)
    before = distance(sample(networks[0], device)).mean().item()
    g, d = make_engines(args, *networks)
    say(f"generator at stage {g.stage}, discriminator at stage {d.stage}, {axis.size} rank(s), "
        f"unwanted gradients: {args.discard}")  # fmt: skip
    step, batches = make_step(args.discard), Batches(args.batch, args.seed)
    for number in range(1, args.steps + 1):
        noise, real = (mine(x).to(device) for x in batches.next())
        of_g, of_d = (fzero.pmean(loss).item() for loss in step(g, d, noise, real))
        if number % 100 == 0 or number == args.steps:
            line = f"loss of generator {of_g:.3f}, of discriminator {of_d:.3f}"
            say(f"step {number}: {line}", flush=True)
    points = sample(g, device)
    after = distance(points).mean().item()
    near = torch.cdist(points, modes().to(points)).argmin(1)[distance(points) < 0.5]
    say(f"distance to the nearest mode: {before:.3f} before, {after:.3f} after; "
        f"{len(near.unique())} of {MODES} modes reached")  # fmt: skip
    if not after * FACTOR < before:
        raise SystemExit(f"not {FACTOR:g} times nearer after {args.steps} steps")
    if args.check:
        off = update_error(args, device)
        say(f"check: {CHECKED_STEPS} steps are those of plain PyTorch to {off:.1e} (float64)")
        if not off < TOLERANCE:
            raise SystemExit(f"check: more than {TOLERANCE:.0e} off")


def at_least_one(text: str) -> int:
    """A count that is given on the command line."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def parse() -> argparse.Namespace:
    """Return the options; a batch that cannot be split evenly ends the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generator-stage", type=int, default=3, choices=range(4))
    parser.add_argument("--discriminator-stage", type=int, default=1, choices=range(4))
    parser.add_argument("--discard", default="zero_grad", choices=["zero_grad", "freeze", "cut"])
    parser.add_argument("--steps", type=at_least_one, default=600, help="of both networks")
    parser.add_argument("--batch", type=int, default=256, help="points of a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and points")
    parser.add_argument("--check", action="store_true", help="compare with plain PyTorch")
    args = parser.parse_args()
    size = fzero.world().size
    if args.batch < size or args.batch % size:
        parser.error(f"--batch {args.batch}: Fix: a multiple of the {size} ranks.")
    return args


if __name__ == "__main__":
    main()
