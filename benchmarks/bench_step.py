"""Train one model with every contestant side by side and print what a step costs.

    python benchmarks/bench_step.py --model mlp,gpt --world 1,2,4 --backwards 1,4

For each model, world size W and number N of backward calls per optimizer step, W gloo processes
are started, every contestant is built with the same weights, data and AdamW, and all are stepped
in turn, so that a ratio inside one table compares like with like. The losses of the first steps
must be those of one process that has all the data; if they are not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

from ranks import run_groups, run_ranks
from report import write_report
from step.apart import BURST, Turn, open_turns
from step.measure import CHECKED_STEPS, Plan, Row, find_contestants, measure
from step.models import make_task
from step.table import BF16_TOLERANCE, LOSS_TOLERANCE, disagreements, markdown

_LEGEND = f"""\
Milliseconds are the median over rounds of the slowest rank; "min" is its best round. "Reduces"
says whether gradients are reduced once per optimizer step or in each of the N backward calls.
Stage "3" gathers parameters for forward and again for backward, "3 keep" once. The last ratio is
to the fastest peer that agrees on both: of the medians, its name, and of the best rounds (which
other work on the machine disturbs less). AR, AG, RS, A2A, BC: all-reduce, all-gather,
reduce-scatter, all-to-all, broadcast, in one step of one rank, with the bytes of the full buffers;
fzero on gloo gathers by W broadcasts and reduce-scatters by single sends, and its ranks tell each
other what they are about to do (A2A of a few bytes, a constant number of them; AG in files before
2026-11-23). "Ring" is what these must send at least (2P(W-1)/W for an all-reduce of P bytes,
P(W-1)/W for the others), "loopback" what the machine sent, other programs included. Resident bytes
are what model, gradients and
optimizer hold after a step, peak bytes the most that was alive after any operation of a step, on
the fullest rank; what a kernel or gloo allocates for itself is not seen. "Loss error" is the
largest relative difference from one process that has all the data, over {CHECKED_STEPS} steps
(allowed: {LOSS_TOLERANCE:.0e}; in bfloat16 {BF16_TOLERANCE:.0e}). `plain` does not communicate: it
shows what the arithmetic costs. With --apart each contestant has processes of its own, and a time
is the mean of {BURST} steps in a row.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mlp", help="mlp, gpt, small, or several: mlp,gpt")
    parser.add_argument("--world", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--backwards", default="1,4", help="backward calls per optimizer step")
    parser.add_argument("--contestants", default="", help="names; default: all")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each contestant")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those")
    parser.add_argument(
        "--apart", action="store_true", help="each contestant in processes of its own, in turn"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    parser.add_argument("--label", default="", help="at the end of that file's theme")
    return parser


def _plans(options: argparse.Namespace) -> list[Plan]:
    names = tuple(name for name in options.contestants.split(",") if name)
    worlds = [int(world) for world in options.world.split(",")]
    backwards = [int(count) for count in options.backwards.split(",")]
    if min(worlds) < 1:
        raise ValueError(f"--world {options.world}: a world has 1 rank or more.")
    if options.warmup + options.rounds < CHECKED_STEPS:
        raise ValueError(
            f"{options.warmup} + {options.rounds} steps are too few to check {CHECKED_STEPS} "
            "losses.\nFix: raise --rounds or --warmup."
        )
    plans = [
        Plan(
            model=model,
            world_size=world,
            backwards=count,
            rounds=options.rounds,
            warmup=options.warmup,
            names=names,
        )
        for model, world, count in itertools.product(options.model.split(","), worlds, backwards)
    ]
    for plan in plans:  # a wrong name is found now, not in the middle of the last table
        find_contestants(make_task(plan.model, backwards=plan.backwards), plan.names)
    return plans


Measured = tuple[list[Row], list[float], list[str]]


def _together(plan: Plan) -> Measured:
    return run_ranks(measure, plan.world_size, plan)


def _apart(plan: Plan) -> Measured:
    contestants, skipped = find_contestants(
        make_task(plan.model, backwards=plan.backwards), plan.names
    )
    store, names = open_turns(), [who.name for who in contestants]
    turns = [Turn(port=store.port, at=at, count=len(names)) for at in range(len(names))]
    plans = [
        replace(plan, names=(name,), turn=turn) for name, turn in zip(names, turns, strict=True)
    ]
    measured = run_groups(measure, plan.world_size, [(one,) for one in plans])
    return [row for rows, _, _ in measured for row in rows], measured[0][1], skipped


def main() -> int:
    """Measure every plan of the command line; 1 if any losses disagree."""
    parser = _parser()
    options = parser.parse_args()
    try:
        plans = _plans(options)
    except ValueError as error:
        parser.error(str(error))
    theme = "-".join(["step", *options.model.split(","), *filter(None, [options.label])])
    tables: list[str] = []
    wrong: list[str] = []
    for plan in plans:
        print(f"{plan.model}, W={plan.world_size}, N={plan.backwards} ...", flush=True)
        rows, reference, skipped = (_apart if options.apart else _together)(plan)
        tables.append(markdown(plan, rows, reference))
        tables += [f"Skipped {reason}.\n" for reason in skipped]
        found = disagreements(plan, rows, reference)
        tables += [f"**LOSSES DISAGREE**: {line}.\n" for line in found]
        wrong += found
        print("\n".join(tables[-1 - len(skipped) - len(found) :]), flush=True)
        if options.out is not None:  # after each table: the last may take long
            print(f"wrote {write_report(options.out, theme, tables, intro=_LEGEND)}")
    for line in wrong:
        print(f"LOSSES DISAGREE: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
