"""The table and the picture of docs/gallery/silent_bugs.md: tools, loss curves, torch's DebugMode.

    python benchmarks/gallery/silent_bugs.py --out benchmarks/results

The tools are those of examples/silent_bugs.py. A loss curve shows a bug if it is further from the
sound curve of the same batches than four sound runs of other batches are from each other.
DebugMode lists what a rank of two gloo processes dispatches in two
updates, with hashes of the tensors; `check_hash_mismatches` compares two such lists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from ranks import run_ranks  # noqa: E402
from report import hardware, write_report  # noqa: E402
from torch.utils._debug_mode import DebugMode  # noqa: E402

import silent_bugs as zoo  # noqa: E402

TOOLS = ("certify", "diff", "prove", "plan", "record")
SEEDS = range(1, 4)
PICTURE = ROOT / "docs" / "_static" / "gallery" / "silent_bugs.png"
_INTRO = """Two virtual ranks, stage 2; each cell has the seconds that the tool took, in bold if it
names the bug: it has nothing against the sound step, and something against the other. `curve`: the
first of 30 updates at which the bug moves the loss on held-out rows by more than other batches do,
which is the spread of four sound runs at that update, or `no`; and the loss after 30 updates, sound
and with the bug, of the same batches. `DebugMode`: of torch, on two gloo
processes, what `check_hash_mismatches` makes of the lists of two updates of both steps.
"""


def dispatched(name: str) -> dict[str, Any]:
    """Return what DebugMode says of both steps, on a rank of a process group."""
    cage, rank, logs, lines = zoo.Cage(name, 2), torch.distributed.get_rank(), [], []
    for bug in (False, True):
        step = cage.step(bug)
        state = step.init(cage.params, zoo.optimizer(name, bug))
        torch.manual_seed(0)
        with (
            DebugMode(record_stack_trace=True) as mode,
            DebugMode.log_tensor_hashes(hash_fn="hash_tensor"),
        ):
            for number in range(2):
                batches = [(x[rank], y[rank]) for x, y in cage.batches(number)]
                state, _ = step(state, batches)
        logs.append(mode.logs)
        lines.append(mode.debug_string())
    found: dict[str, Any] = {"calls": [len(log) for log in logs]}
    found["lines"] = sorted({int(at) for at in re.findall(r"planted\.py:(\d+)", lines[1])})
    try:
        mismatches = DebugMode.check_hash_mismatches(*logs)
        found["says"] = f"{len(mismatches)} calls have other values"
        if mismatches:
            found["says"] += f", the first is {mismatches[0]['call']}"
    except Exception as error:  # whatever it answers is the answer
        found["says"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def measured(name: str) -> dict[str, Any]:
    """Return what is in the table and in the picture, for one bug."""
    cage = zoo.Cage(name, 2)
    found: dict[str, Any] = {"tools": {}}
    for tool in TOOLS:
        names, said, seconds = zoo.ask(cage, tool)
        found["tools"][tool] = {"names": names, "says": said, "seconds": round(seconds, 2)}
    found["sound"], found["bug"] = cage.losses(False, every=1), cage.losses(True, every=1)
    found["others"] = [cage.losses(False, seed, every=1) for seed in SEEDS]
    before = dict(os.environ)
    found["debug"] = run_ranks(dispatched, zoo.RANKS, name)
    os.environ.clear()
    os.environ.update(before)  # it tells of ranks; the tools have virtual ones
    return found


def visible(one: dict[str, Any]) -> int | None:
    """Return the first update at which the bug moves the loss by more than other batches do."""
    spread = [max(at) - min(at) for at in zip(one["sound"], *one["others"], strict=True)]
    moved = [abs(a - b) for a, b in zip(one["sound"], one["bug"], strict=True)]
    further = [at for at, (a, b) in enumerate(zip(moved, spread, strict=True), 1) if a > b]
    return further[0] if further else None


def table(found: dict[str, Any]) -> str:
    """Return the table of ten, and below it what each tool says."""
    lines = [f"| bug | {' | '.join(TOOLS)} | curve | DebugMode |", "|---" * 8 + "|"]
    for name, one in found.items():
        cells = [
            f"**{tool['seconds']:.2f} s**" if tool["names"] else f"{tool['seconds']:.2f} s"
            for tool in one["tools"].values()
        ]
        at = visible(one)
        seen = "no" if at is None else f"update {at}"
        curve = f"{seen}: {one['sound'][-1]:.3f}, {one['bug'][-1]:.3f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {curve} | {one['debug']['says']} |")
    lines.append("")
    for name, one in found.items():
        lines.append(f"\n## {name}\n")
        for tool, answer in one["tools"].items():
            said = answer["says"].strip() or "nothing"
            mark = "names it" if answer["names"] else "does not name it"
            lines.append(f"{tool} {mark}:\n\n    " + said.replace("\n", "\n    ")[:1500] + "\n")
        calls = one["debug"]["calls"]
        where = ", ".join(map(str, one["debug"]["lines"])) or "none"
        lines.append(f"DebugMode: {calls[0]} and {calls[1]} calls; lines of planted.py: {where}.\n")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the ten curves over the sound ones."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 5, figsize=(13, 5), sharex=True)
    updates = range(1, zoo.STEPS + 1)
    for axis, (name, one) in zip(axes.flat, found.items(), strict=True):
        low, high = (list(map(end, zip(*one["others"], strict=True))) for end in (min, max))
        axis.fill_between(updates, low, high, color="0.85", label="sound, other batches")
        axis.plot(updates, one["sound"], color="0.2", linewidth=2.5, label="sound")
        axis.plot(updates, one["bug"], color="tab:red", linestyle="--", label="with the bug")
        at = visible(one)
        seen = "not visible" if at is None else f"visible at update {at}"
        axis.set_title(f"{name.replace('_', ' ')}\n{seen}", fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0, 0].legend(fontsize=7)
    for axis in axes[1]:
        axis.set_xlabel("update", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("loss on held-out rows", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measure all ten; print the table, or write it, the numbers and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--bug", choices=zoo.BUGS, help="one of the ten; all by default")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--kept", type=Path, help="a folder of what is measured: go on with it")
    args = parser.parse_args()
    for tool in TOOLS:  # what is imported and made once in a process is not measured
        zoo.ask(zoo.Cage("clip_first", 2), tool)
    found = {}
    for name in [args.bug] if args.bug else zoo.BUGS:
        kept = args.kept / f"{name}.json" if args.kept else None
        if kept and kept.exists():
            found[name] = json.loads(kept.read_text())
            continue
        found[name] = measured(name)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found[name]))
    made = table(found)
    print(made)
    if args.out is None:
        return
    path = write_report(args.out, "gallery-silent-bugs", [made], intro=_INTRO)
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, PICTURE)
    print(f"wrote {path} and {PICTURE}, on {hardware()}")


if __name__ == "__main__":
    main()
