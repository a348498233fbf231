"""Time ten steps with a mirror that copies one of them, against ten without.

    python benchmarks/bench_mirror.py --world 2

Each block of ten steps has its copy after the fifth, so that what is done beside the steps is in the
block, too. The ranks are told that each is on a host of its own; with copies=1 each part is sent
over loopback. All blocks step the same engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import interleave_phases, run_ranks
from report import write_report
from step.models import GPT_TOKENS, GPT_VOCABULARY, Gpt

from fzero.adapter import Engine
from fzero.checkpoint import Mirror

EVERY = 10
_INTRO = """\
A GPT of {millions:.1f} million parameters with AdamW, one sequence of {tokens} tokens a rank. Medians
over {rounds} rounds of the slowest rank: the time of a step without a mirror; what a mirror with
every={every} adds to it; the call that copies; the return of the state. W = {world}.
"""


def measured(stage: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Return seconds of ten steps, by name; of calls that copy; and of a restore."""
    os.environ["FZERO_HOST"] = f"host{dist.get_rank()}"
    model = Gpt()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), stage=stage)
    x = torch.randint(GPT_VOCABULARY, (1, GPT_TOKENS))
    calls: list[float] = []

    def block(mirror: Mirror | None) -> None:
        for _ in range(EVERY):
            engine.backward(engine(x, x))
            engine.step()
            if mirror is not None:
                began = time.perf_counter()
                mirror.update(engine)
                calls.append(time.perf_counter() - began)

    block(None)
    mirrors = {
        copies: Mirror(f"{folder}/{copies}", every=EVERY, copies=copies) for copies in (0, 1)
    }
    phases: dict[str, Sequence[Callable[[], object]]] = {"none": (partial(block, None),)}
    for copies, mirror in mirrors.items():
        for _ in range(EVERY // 2):
            mirror.update(engine)
        phases[f"copies={copies}"] = (partial(block, mirror),)
    found = {
        name: some[0] for name, some in interleave_phases(phases, rounds=rounds, warmup=2).items()
    }
    found["call"] = sorted(calls)[-2 * rounds :]
    began = time.perf_counter()
    mirrors[1].restore(engine)
    found["restore"] = [time.perf_counter() - began]
    for mirror in mirrors.values():
        mirror.close()
    return found


def _row(stage: int, found: dict[str, list[float]]) -> str:
    plain, call, back = (statistics.median(found[name]) for name in ("none", "call", "restore"))
    added = [
        statistics.median(x / y - 1 for x, y in zip(found[name], found["none"], strict=True))
        for name in ("copies=0", "copies=1")
    ]
    shares = " | ".join(f"{share:.1%}" for share in added)
    return f"| {stage} | {plain / EVERY * 1e3:.0f} ms | {shares} | {call * 1e3:.0f} ms | {back:.2f} s |"


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = [
        "| stage | a step | + copies=0 | + copies=1 | the call | restore |",
        "|---|---|---|---|---|---|",
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
