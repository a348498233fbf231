"""Time a step with a flight recorder around it against the step alone.

    python benchmarks/bench_record.py --world 2

In each round every contestant makes as many steps as lie between two states that are kept, so a
round has one kept state. Processor time is counted, of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from report import write_report
from step.models import make_task

import fzero

_INTRO = """\
Milliseconds of processor time of a step, median over rounds, and its share of the step's alone. A
state is kept every {every} steps. W = {world}, AdamW.
"""


def _steps(model: str, stage: int, every: int) -> dict[str, Callable[[], None]]:
    """Return what makes one step of each contestant."""
    task = make_task(model, backwards=1)
    apply, params = fzero.functionalize(task.module())
    ((x, y),) = task.batches(step=0, rank=dist.get_rank())

    def step_fn(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(apply, state)(x, y)
        return fzero.apply_gradients(state), loss

    def one(recorded: bool) -> Callable[[], None]:
        step: Any = fzero.shard(step_fn, stage=stage, donate=True)
        state = step.init(params, fzero.optim.adamw(3e-4))
        step = fzero.record(step, every=every) if recorded else step

        def call() -> None:
            nonlocal state
            state, _ = step(state, x, y)

        return call

    return {"step": one(False), "recorded": one(True)}


def measured(model: str, every: int, rounds: int) -> dict[str, list[float]]:
    """Return ms of a step, for each contestant and round."""
    found: dict[str, list[float]] = {}
    for stage in (0, 2, 3):
        steps = _steps(model, stage, every)
        for number in range(rounds + 1):
            for name, step in steps.items():
                dist.barrier()
                begin = time.process_time()
                for _ in range(every):
                    step()
                ms = torch.tensor((time.process_time() - begin) * 1e3 / every)
                dist.all_reduce(ms, dist.ReduceOp.MAX)
                if number:
                    found.setdefault(f"stage {stage}, {name}", []).append(ms.item())
    return found


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = ["| | ms | of the step's alone |", "|---|---|---|"]
    for model in ("mlp", "gpt"):
        found = run_ranks(measured, args.world, model, args.every, args.rounds)
        for name, times in found.items():
            alone = statistics.median(found[name.replace("recorded", "step")])
            ms = statistics.median(times)
            lines.append(f"| {model}, {name} | {ms:.1f} | {ms / alone:.3f} |")
    intro, table = _INTRO.format(world=args.world, every=args.every), "\n".join(lines)
    print(intro, table, sep="\n")
    if args.out is not None:
        print(f"wrote {write_report(args.out, f'record-{args.world}-ranks', [table], intro=intro)}")


if __name__ == "__main__":
    main()
