"""Time a step whose gradients cross a link of limited rate, plain and encoded.

    python benchmarks/slow_link.py --rate 400mbit --stages 0,2,3

The ranks run in a network namespace of their own, whose loopback the kernel limits to that rate
(`tc`, token bucket; Linux, as root). All codecs of a stage are timed in turn in the same
processes: a step is a forward, a backward and an update of an MLP by the engine, coalesced once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import interleave, run_ranks
from report import write_report
from torch import nn

import fzero
from fzero import Compress, codecs
from fzero.adapter import Engine
from fzero.machine.codecs import Codec

CODECS: dict[str, Codec | None] = {
    "plain": None,
    "bf16": codecs.bf16(),
    "int8": codecs.int8(),
    "fp8": codecs.fp8(),
    "int4": codecs.int4(),
}
INSIDE = "FZERO_BENCH_NAMESPACE"
_INTRO = """\
Milliseconds: median over rounds of the slowest rank. Bytes: what a rank sends in a step. At stage 3
parameters are encoded, too; what stage 2 gathers after its update is exact. The loopback of the
ranks is limited to {rate}.
"""


def _step(engine: Engine, x: torch.Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.step()


def measured(stage: int, width: int, rounds: int) -> dict[str, tuple[list[float], int]]:
    """Return, for each codec, the times of the slowest rank, and the bytes that a rank sends."""
    steps: dict[str, Callable[[], None]] = {}
    sent = {}
    for name, codec in CODECS.items():
        compress = Compress(gradients=codec, parameters=codec if stage == 3 else None)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine = Engine(model, sgd, stage=stage, compress=compress)
        x = torch.randn(8, width)
        steps[name] = partial(_step, engine, x)
        steps[name]()
        with fzero.count_collectives() as log:
            steps[name]()
        sent[name] = log.wire_bytes(
            ops=("all_to_all", "reduce_scatter", "all_reduce", "all_gather")
        )
    times = interleave(steps, rounds=rounds, warmup=1)
    return {name: (times[name], sent[name]) for name in CODECS}


def table(found: dict[int, dict[str, Any]]) -> str:
    """Return the numbers as Markdown."""
    lines = []
    for stage, rows in found.items():
        lines += [f"## Stage {stage}", "", "| codec | ms | against plain | bytes | fewer |"]
        lines += ["|---|---|---|---|---|"]
        plain, most = statistics.median(rows["plain"][0]), rows["plain"][1]
        for name, (times, sent) in rows.items():
            ms = statistics.median(times)
            cells = f"{ms:.0f}", f"{plain / ms:.2f}x faster", f"{sent:,}", f"{most / sent:.2f}x"
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def in_namespace(rate: str) -> int:
    """Run this program again in a network namespace whose loopback has this rate."""
    name = f"fzero-{os.getpid()}"
    enter = ["ip", "netns", "exec", name]
    limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "500ms"]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*enter, "ip", "link", "set", "lo", "up"], check=True)
        subprocess.run([*enter, "tc", "qdisc", "add", "dev", "lo", "root", *limit], check=True)
        again = [*enter, sys.executable, *sys.argv]
        return subprocess.run(again, env=os.environ | {INSIDE: "1"}).returncode
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--stages", default="0,2,3")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if INSIDE not in os.environ:
        sys.exit(in_namespace(args.rate))
    found = {
        stage: run_ranks(measured, args.world, stage, args.width, args.rounds)
        for stage in map(int, args.stages.split(","))
    }
    intro, made = _INTRO.format(rate=args.rate), table(found)
    print(intro, made, sep="\n")
    if args.out is not None:
        print(f"wrote {write_report(args.out, 'slow-link', [made], intro=intro)}")


if __name__ == "__main__":
    main()
