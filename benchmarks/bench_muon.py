"""Time the update of a GPT by Muon: every rank does all of it under DDP, owners share it here.

    python benchmarks/bench_muon.py --world 2

Matrices of the blocks go by Muon, in bf16, and all else by AdamW. Gradients are reduced before the
clock starts; what is timed is the update, with the exchanges that it makes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import interleave_phases, run_ranks
from report import write_report
from step.models import GPT_TOKENS, GPT_VOCABULARY, Gpt
from torch.nn.parallel import DistributedDataParallel

import fzero
from fzero.adapter import Engine

LR, ADAM_LR = 0.02, 3e-4
_INTRO = """\
Milliseconds of an update: median over rounds of the slowest rank, and its share of DDP's. At
stages 1 and 2 it gathers the parameters, too. W = {world}.
"""


def _goes_by_muon(path: str, dims: int) -> bool:
    return "blocks" in path and dims == 2


def _of_ddp(model: Gpt) -> tuple[torch.nn.Module, Callable[[], None], Callable[[], None]]:
    named = list(model.named_parameters())
    matrices = [p for path, p in named if _goes_by_muon(path, p.ndim)]
    rest = [p for path, p in named if not _goes_by_muon(path, p.ndim)]
    both = torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(rest, lr=ADAM_LR, fused=True)

    def update() -> None:
        for one in both:
            one.step()

    def clear() -> None:
        model.zero_grad()

    return DistributedDataParallel(model), update, clear


def _label(leaf: Any) -> str:
    return "muon" if _goes_by_muon(leaf.path, len(leaf.shape)) else "adamw"


def measured(rounds: int) -> dict[str, list[float]]:
    """Return the times of the updates."""
    x = torch.randint(GPT_VOCABULARY, (1, GPT_TOKENS))
    phases: dict[str, Sequence[Callable[[], object]]] = {}
    ddp, update, clear = _of_ddp(Gpt())

    def backward() -> None:
        clear()
        ddp(x, x).backward()

    phases["DDP"] = backward, update
    for stage in range(4):
        rules = {"muon": fzero.optim.muon(LR), "adamw": fzero.optim.adamw(ADAM_LR)}
        engine = Engine(Gpt(), fzero.optim.partition(rules, _label), stage=stage)
        phases[f"stage {stage}"] = partial(_backward, engine, x), engine.step
    times = interleave_phases(phases, rounds=rounds, warmup=2)
    return {name: of_phases[1] for name, of_phases in times.items()}


def _backward(engine: Engine, x: torch.Tensor) -> None:
    engine.backward(engine(x, x))


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    found = run_ranks(measured, args.world, args.rounds)
    whole = statistics.median(found["DDP"])
    lines = ["| | ms | of DDP's |", "|---|---|---|"]
    for name, times in found.items():
        ms = statistics.median(times)
        lines.append(f"| {name} | {ms:.0f} | {ms / whole:.2f} |")
    intro, table = _INTRO.format(world=args.world), "\n".join(lines)
    print(intro, table, sep="\n")
    if args.out is not None:
        print(f"wrote {write_report(args.out, f'muon-{args.world}-ranks', [table], intro=intro)}")


if __name__ == "__main__":
    main()
