"""A zoo: ten silent bugs of public training code, each planted into a small step on two ranks.

    python examples/silent_bugs.py
    python examples/silent_bugs.py --bug clip_first --stage 3

Five tools look at the step with the bug and at the sound one (planted.py has both), on virtual
ranks of one process. A tool names a bug if it has nothing against the sound step, and something
against the other. Beside it is what training shows: the loss on held-out rows after 30 updates.
docs/gallery/silent_bugs.md has the public threads, the curves, and what the tools say.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from planted import BUGS, EXPERTS, STEPS, Net, made, optimizer

RANKS, ROWS = 2, 11
# What each tool needs beside the step: certify a plain model and loss; diff and record the sound
# step; plan its bytes and collectives; prove nothing. At other stages it may be other tools.
NAMED = {
    "loss_twice": {"certify", "diff", "record"},
    "mean_of_means": {"diff", "record"},
    "one_rank": {"certify", "diff", "prove", "plan", "record"},
    "bf16_moments": {"plan", "record"},
    "adapter_by_parts": {"certify", "diff", "record"},
    "dropout_redrawn": {"diff", "record"},
    "counted_twice": {"diff", "record"},
    "clip_first": {"certify", "diff", "plan", "record"},
    "padding_counted": {"diff", "record"},
    "stale_scheduler": {"diff", "record"},
}


def sample(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows [..., 6] and their targets [..., 1]."""
    x = torch.randn(*shape, 6, generator=torch.Generator().manual_seed(seed))
    return x, torch.tanh(x[..., :1]) + x[..., 1:2] / 2


class Cage:
    """A bug, its sound step, and what both are given."""

    def __init__(self, name: str, stage: int) -> None:
        torch.manual_seed(0)
        self.name, self.stage = name, stage
        self.model = Net(dropout=0.2 if name == "dropout_redrawn" else 0.0)
        self.apply, self.params = fzero.functionalize(self.model)
        self.parts = 2 if name == "loss_twice" else 1  # micro-batches of an update

    def loss(self, params: Any, batch: Any, counts: Tensor | None = None) -> Tensor:
        """Return the mean loss of a micro-batch, divided by their number."""
        x, y = batch
        if counts is None and self.name == "counted_twice":
            counts = torch.zeros(EXPERTS)
        return F.mse_loss(self.apply(params, x, counts), y) / self.parts

    def batches(self, number: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of an update, the ranks first."""
        x, y = sample(RANKS, ROWS, seed=1000 * seed + number)
        if self.name == "padding_counted":  # the sampler of each rank has the whole data set
            x, y = x[:1].expand_as(x).contiguous(), y[:1].expand_as(y).contiguous()
        return list(zip(x.chunk(self.parts, 1), y.chunk(self.parts, 1), strict=True))

    def step(self, bug: bool) -> Any:
        """Return the sharded step."""
        return made(self.name, bug, self.stage, self.loss)

    def losses(self, bug: bool, seed: int = 0, every: int = STEPS) -> list[float]:
        """Return the loss on held-out rows, of what rank 0 has, after `every` updates each."""
        step = fzero.simulate(self.step(bug), world_size=RANKS)
        whole = fzero.simulate(fzero.full_params, world_size=RANKS)
        state, losses = step.init(self.params, optimizer(self.name, bug)), []
        held_out, model = sample(256, seed=10**6), Net()  # without dropout
        torch.manual_seed(seed)
        for number in range(STEPS):
            state, _ = step(state, self.batches(number, seed))
            if (number + 1) % every:
                continue
            params = {name: p[0] for name, p in whole(state).items()}
            counts = torch.zeros(EXPERTS) if self.name == "counted_twice" else None
            found = torch.func.functional_call(model, params, (held_out[0], counts))
            losses.append(F.mse_loss(found, held_out[1]).item())
        return losses

    def certify(self, bug: bool) -> str:
        """Compare the step with one process, which has the model and the loss alone."""
        if self.name == "counted_twice":
            return ""  # its loss is given what it counts in, which certify does not know
        report = fzero.certify(
            self.model,
            lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            lambda number: sample(ROWS, seed=number),
            step=lambda loss, **_: BUGS[self.name](loss, bug),
            clipping="on" if self.name == "clip_first" else "off",
            micro_batches=self.parts, stages=self.stage, worlds=RANKS, precisions="fp64",
            windows="each", offload="none", meshes="flat", reductions="mean", wires="own",
            rules="given", ragged="off", loss_scales="1", buckets="64",
        )  # fmt: skip
        return "\n".join(failure.describe().split("\n", 1)[1] for failure in report.failures)

    def diff(self, bug: bool) -> str:
        """Compare the step with the sound one, number by number."""
        runs = [
            fzero.tools.Run(
                step=self.step(one), params=self.params, optimizer=optimizer(self.name, one),
                batches=[self.batches(number) for number in range(3)], world_size=RANKS,
            )
            for one in (False, bug)
        ]  # fmt: skip
        return str(fzero.diff(*runs) or "")

    def prove(self, bug: bool) -> str:
        """Is the program of two ranks that of one rank with the mean gradient?"""
        step = self.step(bug)
        state = step.init(self.params, optimizer(self.name, bug))
        batches = [(x[0], y[0]) for x, y in self.batches(0)]
        proof = fzero.prove(step, state, batches, world=RANKS)
        # A gradient that is taken by hand is not proved on any number of ranks: that is no answer.
        answers = [claim for claim in proof.unshown if "on one rank" not in claim.why]
        return "\n".join(f"{claim.tensor} {claim.leaf}: {claim.why}" for claim in answers)

    def plan(self, bug: bool) -> str:
        """Compare bytes and collectives with those of the sound step."""
        batches = [(x[0], y[0]) for x, y in self.batches(0)]
        said = []
        for one in (False, bug):
            by = optimizer(self.name, one)
            plan = fzero.plan.of_step(self.step(one), self.params, by, batches, world=RANKS)
            said.append({**plan.bytes, **plan.collectives})
        kinds = sorted(said[0].keys() | said[1].keys())
        return ", ".join(
            f"{kind} {said[0].get(kind, 0)} -> {said[1].get(kind, 0)}"
            for kind in kinds
            if said[0].get(kind, 0) != said[1].get(kind, 0)
        )

    def record(self, bug: bool) -> str:
        """Make a recorded run again by the sound step: where do they part?"""
        step = fzero.record(every=2)(fzero.simulate(self.step(bug), world_size=RANKS))
        state = step.init(self.params, optimizer(self.name, bug))
        for number in range(3):
            state, _ = step(state, self.batches(number))
        sound = fzero.simulate(self.step(False), world_size=RANKS)
        by = optimizer(self.name, False)
        return str(
            fzero.bisect(step.recording, sound, init=lambda step: step.init(self.params, by)) or ""
        )


def ask(cage: Cage, tool: str) -> tuple[bool, str, float]:
    """Return whether a tool names the bug, what it says of it, and in how many seconds."""
    begun = time.perf_counter()
    answers = []
    for bug in (True, False):
        try:
            answers.append(getattr(cage, tool)(bug))
        except (fzero.LayoutError, fzero.PhaseError) as error:
            answers.append(str(error))  # a step or a state that the tool cannot read
        if bug:
            seconds = time.perf_counter() - begun
    return bool(answers[0]) and not answers[1], answers[0], seconds


def main() -> None:
    """Ask each tool about each bug, and fail if another one names it than is claimed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", choices=BUGS, help="one of the ten; all by default")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "the loss requires no grad")
    wrong = []
    for name in [args.bug] if args.bug else BUGS:
        cage = Cage(name, args.stage)
        sound, bug = cage.losses(False)[-1], cage.losses(True)[-1]
        print(f"{name}: loss {sound:.4f}, with the bug {bug:.4f}")
        named = set()
        for tool in ("certify", "diff", "prove", "plan", "record"):
            names, said, seconds = ask(cage, tool)
            named |= {tool} if names else set()
            first = said.strip().splitlines()[0][:120] if names else "-"
            print(f"    {tool:8} {seconds:5.2f} s  {first}")
        if named != NAMED[name] if args.stage == 2 else not named:
            wrong.append(f"{name} is named by {sorted(named)}")
    print(f"check: {len(wrong)} bug(s) are named by other tools than is claimed")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
