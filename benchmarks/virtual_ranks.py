"""Time and memory of many virtual ranks: a 2-layer MLP, AdamW, stage 3.

    python benchmarks/virtual_ranks.py --world 1,8,64,512,1024 --out benchmarks/results

Each world runs in a process of its own, on one core where the system can say so: init, one step
(the first one, in which ranks ask each other) and the full parameters, as `fzero.simulate` gives
them. Before it is timed, all of it has run once on two ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INTRO = """\
Seconds of wall clock; in parentheses CPU milliseconds for each rank, which a busy machine changes
less. Memory is the largest resident size of the process; `import` is what it had before.
"""
MIB = 1024  # ru_maxrss is in KiB on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One world: for each phase and their sum the wall and CPU seconds, and MiB."""

    world: int
    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    import_mib: float
    peak_mib: float


def measure(world: int, width: int) -> Record:
    """Run the three phases on `world` virtual ranks."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch
    import torch.nn.functional as F

    import fzero

    torch.manual_seed(0)
    import_mib = _peak_mib()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
    )
    apply, params = fzero.functionalize(model)

    def loss_fn(p: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(apply(p, batch[0]), batch[1])

    def step_fn(state: Any, batch: Any) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(batch)
        return fzero.apply_gradients(state), loss

    def run(ranks: int) -> tuple[dict[str, float], dict[str, float]]:
        step = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=ranks)
        full = fzero.simulate(fzero.full_params, world_size=ranks)
        batch = torch.randn(ranks, 4, 16), torch.randn(ranks, 4, 8)
        phases: dict[str, Callable[[Any], Any]] = {
            "init": lambda _: step.init(params, fzero.optim.adamw(1e-3)),
            "step": lambda state: step(state, batch)[0],
            "full_params": full,
        }
        value, wall, cpu = None, {}, {}
        for name, phase in phases.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            value = phase(value)
            wall[name] = time.perf_counter() - began
            cpu[name] = time.process_time() - began_cpu
        return wall, cpu

    run(2)
    wall, cpu = run(world)
    return Record(world=world, wall_s=wall, cpu_s=cpu, import_mib=import_mib, peak_mib=_peak_mib())


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def table(records: Sequence[Record]) -> str:
    """Markdown: a row for each world."""
    names = [*records[0].wall_s, "all"]
    lines = [f"| W | {' | '.join(names)} | import | peak |", "|---" * (len(names) + 3) + "|"]
    for one in records:
        walls = [*one.wall_s.values(), sum(one.wall_s.values())]
        cpus = [*one.cpu_s.values(), sum(one.cpu_s.values())]
        cells = [
            f"{wall:.2f} s ({1e3 * cpu / one.world:.1f} ms)"
            for wall, cpu in zip(walls, cpus, strict=True)
        ]
        sizes = f"{one.import_mib:.0f} MiB | {one.peak_mib:.0f} MiB"
        lines.append(f"| {one.world} | {' | '.join(cells)} | {sizes} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse the command line, measure every world, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", default="1,8,64,512,1024", help="numbers of ranks")
    parser.add_argument("--width", type=int, default=32, help="of the hidden layer")
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")
    records = []
    for world in map(int, options.world.split(",")):
        with spawn.Pool(1) as pool:
            records.append(pool.apply(measure, (world, options.width)))
        print(records[-1], flush=True)
    print(table(records))
    if options.out is not None:
        from report import write_report

        path = write_report(options.out, "virtual-ranks", [table(records)], intro=_INTRO)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
