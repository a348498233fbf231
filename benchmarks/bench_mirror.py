"""Time ten steps with a mirror that copies one of them, against ten without.

    python benchmarks/bench_mirror.py --world 2

Each block of ten steps has its copy after the fifth, so that what is done beside steps is in it,
too. The ranks are told that each is on a host of its own; with copies=1 each part is sent
over loopback. All blocks step the same engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import interleave, run_ranks
from report import write_report
from step.models import GPT_TOKENS, GPT_VOCABULARY, Gpt

from fzero.adapter import Engine
from fzero.checkpoint import Mirror

EVERY = 10
_INTRO = """\
A GPT of {millions:.1f} million parameters with AdamW, one sequence of {tokens} tokens a rank, each
rank on a host of its own. A step without a mirror, by the clock; what a mirror with every={every}
adds to a step, by the clock and in CPU time of all ranks; the call that copies; the return of the
state. Medians over {rounds} rounds. W = {world}.
"""


def measured(stage: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Return milliseconds of ten steps, by name; of calls that copy; and of a restore."""
    os.environ["FZERO_HOST"] = f"host{dist.get_rank()}"
    model = Gpt()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), stage=stage)
    x = torch.randint(GPT_VOCABULARY, (1, GPT_TOKENS))
    calls: list[float] = []
    cpu: dict[str, list[float]] = {}

    def block(name: str, mirror: Mirror | None) -> None:
        used = time.process_time()
        for number in range(EVERY):
            engine.backward(engine(x, x))
            engine.step()
            if mirror is not None:
                began = time.perf_counter()
                mirror.update(engine)
                if number == EVERY // 2 - 1:
                    calls.append(1e3 * (time.perf_counter() - began))
        cpu.setdefault(f"{name} cpu", []).append(1e3 * (time.process_time() - used))

    block("first", None)
    mirrors = {n: Mirror(f"{folder}/{n}", every=EVERY, copies=n) for n in (0, 1)}
    phases = {"none": partial(block, "none", None)}
    for copies, mirror in mirrors.items():
        for _ in range(EVERY // 2):
            mirror.update(engine)
        phases[f"copies={copies}"] = partial(block, f"copies={copies}", mirror)
    found = interleave(phases, rounds=rounds, warmup=2)
    for name, times in cpu.items():
        total = torch.tensor(times[-rounds:], dtype=torch.float64)
        dist.all_reduce(total)
        found[name] = total.tolist()
    began = time.perf_counter()
    mirrors[1].restore(engine)
    found |= {"call": calls[-2 * rounds :], "restore": [time.perf_counter() - began]}
    for mirror in mirrors.values():
        mirror.close()
    return found


def _row(stage: int, found: dict[str, list[float]]) -> str:
    step_ms, call_ms, back_s = (statistics.median(found[x]) for x in ("none", "call", "restore"))
    cells = [f"{stage}", f"{step_ms / EVERY:.0f} ms"]
    for name in ("copies=0", "copies=1"):
        for kind in ("", " cpu"):
            pairs = zip(found[name + kind], found["none" + kind], strict=True)
            cells.append(f"{statistics.median(x / y - 1 for x, y in pairs):.1%}")
    return f"| {' | '.join([*cells, f'{call_ms:.0f} ms', f'{back_s:.2f} s'])} |"


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = [
        "| stage | step | copies=0 | CPU | copies=1 | CPU | the call | restore |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stage in args.stages:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            found = run_ranks(measured, args.world, stage, args.rounds, folder)
        lines.append(_row(stage, found))
    intro = _INTRO.format(
        millions=sum(p.numel() for p in Gpt().parameters()) / 1e6,
        tokens=GPT_TOKENS,
        rounds=args.rounds,
        every=EVERY,
        world=args.world,
    )
    table = "\n".join(lines)
    print(intro, table, sep="\n")
    if args.out is not None:
        print(f"wrote {write_report(args.out, f'mirror-{args.world}-ranks', [table], intro=intro)}")


if __name__ == "__main__":
    main()
