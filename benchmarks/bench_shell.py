"""What an engine costs where the model is nearly nothing: many parameters of 8 elements.

    python benchmarks/bench_shell.py --world 1,2 --out benchmarks/results

For each world size three kinds of tables: everyone at 100, 1,000 and 10,000 parameters in one
module; the adapter and DDP at several numbers of buckets; and stage 3 with many small units. The
sums of the parameters must be those of one process that has all the data; if not, it exits with 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ranks import run_ranks
from report import write_report
from shell.contestants import LARGE
from shell.measure import Plan, measure
from shell.table import TOLERANCE, disagreements, markdown

_LEGEND = f"""\
Every parameter has 8 elements, and its share of the model is one multiply in forward, one in
backward, and one copy. "Backward" is forward, backward and the reduction; "update" is the
optimizer's step, what makes it known to the other ranks, and clearing. Both are timed after a
barrier; the median over rounds of the slowest rank, divided by the number of parameters. "Minus
plain" takes off what the same costs in plain PyTorch, in the same run: in bold, what one hook
costs, the share of buckets and collectives included; "min" is the same of the best rounds. An
adapter waits for what it has launched when the gradients are needed: that wait is in its update.
"/ fastest peer" compares whole steps (see "whole step ms", the median) with the fastest of DDP,
ZeroRedundancyOptimizer, FSDP2 and DeepSpeed at that stage. "Buckets" are those of the
adapter's gradients. Collectives: in one step of one rank; AR, AG, RS, A2A, BC as in the step
tables. "Loss error" is relative to the change that all steps made (allowed: {TOLERANCE:.0e});
`plain` at W > 1 has its own data only. ds3_persist and adapter3_persist keep every parameter
gathered (DeepSpeed's default below 100,000 elements; persistence_threshold_numel=1,000,000, the
parameters of one module being one unit of the adapter).
"""
_UNITS = (1_000, 100)  # parameters, modules


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", default="1,2", help="numbers of ranks")
    parser.add_argument("--parameters", default="100,1000,10000", help="numbers of parameters")
    parser.add_argument("--buckets", default="1,10,100,1000", help="of the largest model")
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed steps; a third for large models"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    return parser


def _plans(options: argparse.Namespace) -> list[Plan]:
    plans: list[Plan] = []
    counts = [int(count) for count in options.parameters.split(",")]
    numbers = tuple(int(number) for number in options.buckets.split(","))

    def shape(count: int, parts: int = 1) -> dict[str, int]:
        rounds = options.rounds if count < LARGE else max(options.rounds // 3, 1)
        return {"parts": parts, "rounds": rounds}

    for world in (int(world) for world in options.world.split(",")):
        for count in counts:
            plans.append(Plan(kind="parameters", world_size=world, count=count, **shape(count)))
        if world > 1:  # one rank alone has no buckets and gathers nothing
            large, (small, parts) = counts[-1], _UNITS
            plans += [
                Plan(
                    kind="buckets", world_size=world, count=large, numbers=numbers, **shape(large)
                ),
                Plan(kind="units", world_size=world, count=small, **shape(small, parts)),
            ]
    return plans


def main() -> int:
    """Measure every plan of the command line; 1 if any losses disagree."""
    options = _parser().parse_args()
    tables: list[str] = []
    wrong: list[str] = []
    for plan in _plans(options):
        rows, skipped = run_ranks(measure, plan.world_size, plan)
        found = disagreements(plan, rows)
        tables.append(markdown(plan, rows))
        tables += [f"Skipped {reason}.\n" for reason in skipped]
        tables += [f"**LOSSES DISAGREE**: {line}.\n" for line in found]
        wrong += found
        print("\n".join(tables[-1 - len(skipped) - len(found) :]), flush=True)
        if options.out is not None:  # after each table: the last may take long
            print(f"wrote {write_report(options.out, 'shell', tables, intro=_LEGEND)}")
    for line in wrong:
        print(f"LOSSES DISAGREE: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
