"""Time training steps of a GPT of about 1 billion parameters on one GPU, beside the peers.

    python benchmarks/bench_gpu.py --out benchmarks/results
    python benchmarks/bench_gpu.py --world 2 --layers 4 --rounds 3 --blocks 1    # two nccl ranks
    python benchmarks/bench_gpu.py --device cpu --layers 2 --width 64 --vocabulary 512 --tokens 32

Everyone has the same weights, batches and fused AdamW. Contestants are built one after the other,
for a billion parameters of each would not fit side by side; all of it is done in two passes, and
a difference that is smaller than that between the passes says nothing. Losses of the first steps
must be those of plain PyTorch on the batches of all ranks; if not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from gpu.contestants import contestants
from gpu.measure import BLOCK, CHECKED, Plan, Row, measure
from gpu.model import Task
from gpu.table import disagreements, markdown
from ranks import run_ranks
from report import write_report

LEGEND = f"""\
{{numel:.1f}} M parameters, {{precision}}, {{samples}} x {{tokens}} tokens a rank, W = {{world}}.
"bf16": parameters, gradients and moments in bf16. "masters": arithmetic in bf16, all else in fp32.
"Step" is a step between two syncs, "of {BLOCK}" a step of {BLOCK} with one sync at their end, and
"host" the same when the host was done: where it is near "of {BLOCK}", the device waited for Python.
Medians over all passes, in ms, and in brackets the medians of each pass; the ratio is to plain
PyTorch ("of {BLOCK}"). Resident bytes are those after a step, peak bytes those in a step,
activations included. The loss error is the largest relative difference from plain PyTorch over the
first {CHECKED} steps; at W > 1 plain PyTorch has the batches of all ranks, so its times and bytes
are not those of one. Two ranks on one GPU share its time and talk over loopback sockets: their
times say nothing about two GPUs, their bytes and losses do.
"""


def main() -> int:
    """Measure, print, and write a file with --out; 1 if losses disagree or somebody failed."""
    given = _parser().parse_args()
    os.environ["FZERO_ONE_RANK_GROUP"] = "1"  # one rank runs its collectives, as DDP and FSDP2 do
    known = contestants(given.world)
    names = given.contestants.split(",") if given.contestants else list(known)
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"no contestant is called {unknown}.\nFix: choose from {sorted(known)}.")
    names = ["plain", *(name for name in names if name != "plain")]
    task = Task(
        layers=given.layers,
        width=given.width,
        vocabulary=given.vocabulary,
        samples=given.samples,
        tokens=given.tokens,
        precision=given.precision,
        device=given.device,
    )
    plan = Plan(task=task, names=names, rounds=given.rounds, blocks=given.blocks)
    backend = "nccl" if given.device == "cuda" else "gloo"
    rows: list[Row] = []
    wrong: list[str] = []
    for number in range(given.passes):
        print(f"pass {number + 1} of {given.passes}", flush=True)
        more, failed = run_ranks(measure, given.world, plan, backend=backend)
        rows += more
        wrong += [f"{name} failed: {error}" for name, error in failed.items()]
        plan = replace(plan, names=[name for name in plan.names if name not in failed])
        _report(given, rows, wrong)  # after each pass: the next may be cut short
    return 1 if wrong + disagreements(rows) else 0


def _report(given: argparse.Namespace, rows: list[Row], failed: list[str]) -> None:
    numel = 12 * given.layers * given.width**2 + given.vocabulary * given.width
    intro = LEGEND.format(numel=numel / 1e6, **vars(given))
    lines = [markdown(rows), *(f"**{line}**\n" for line in failed + disagreements(rows))]
    print(intro, *lines, sep="\n", flush=True)
    if given.out is not None:
        theme = f"gpu-{given.device}-{given.precision}-w{given.world}"
        path = write_report(given.out, theme, lines, intro=intro, device=given.device)
        print(f"wrote {path}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--world", type=int, default=1, help="ranks; they share the GPUs")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "masters"])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="steps that are timed one by one")
    parser.add_argument("--blocks", type=int, default=2, help=f"blocks of {BLOCK} steps")
    parser.add_argument("--passes", type=int, default=2, help="how often all of it is done")
    parser.add_argument("--contestants", default="", help="names; default: all")
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
