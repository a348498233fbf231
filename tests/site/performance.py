"""The tables of speed and memory in the README and in docs/, of what benchmarks/results has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from tests.site.results import Measured, measured
from tests.site.tables import table

PEER = "/ fastest peer of the stage"
STEP = {
    "contestant": "contestant",
    "stage": "stage",
    "reduces": "reduces",
    "median ms": "ms",
    "min": "best ms",
    PEER: "over the fastest peer",
    "ring MiB sent per rank": "MiB sent",
    "resident MiB": "MiB held",
    "peak MiB": "MiB at most",
}
SHELL = {
    "contestant": "contestant",
    "stage": "stage",
    "minus plain": "us a parameter",
    "/ fastest peer": "over the fastest peer",
    "whole step ms": "step ms",
}
STAGES = {"0": "stage 0", "1": "stage 1", "3": "stage 3", "3_keep": "stage 3, kept"}
DRIVERS = {"adapter": "Engine", "fzero": "functional step"}
MODELS = {"mlp": "MLP 8 x 1024", "gpt": "GPT 6 x 256", "small": "8 layers of 64"}
PEERS = {
    "ddp": "DDP",
    "zero1": "ZeroRedundancyOptimizer",
    "fsdp2_reshard": "FSDP2",
    "fsdp2_keep": "FSDP2",
}
LEVELS = {  # of memory: what is compared with what
    "stage 0": ("ddp", "fzero0"),
    "stage 1": ("zero1", "fzero1"),
    "stage 3": ("fsdp2_reshard", "fzero3"),
    "stage 3, kept": ("fsdp2_keep", "fzero3_keep"),
}


def headline() -> str:
    """Return the tables of the page, in Markdown: time over that of the peers, and memory."""
    steps = measured("step-")
    return "\n".join(
        [
            "## Time",
            "",
            "The median time of a step over that of the fastest peer of the same stage, and in "
            "brackets the best rounds; one backward in a step. Below 1 fzero is faster.",
            "",
            glance(steps),
            "## Memory",
            "",
            "The most MiB of tensors that a rank holds during a step, on 2 ranks; the peer's, and "
            "in bold fzero's, with either driver.",
            "",
            memory(steps),
        ]
    )


def short() -> str:
    """Return the table of the README: the engine, two models, 2 and 4 ranks."""
    steps = measured("step-")
    return glance(steps, models=("mlp", "gpt"), worlds=("2", "4"), drivers=("adapter",))


def archive() -> str:
    """Return every table that was measured, in Markdown."""
    return "\n".join(
        [
            "## Steps",
            "",
            *_shown(measured("step-"), STEP),
            "## What a driver costs for each parameter",
            "",
            *_shown(measured("shell_"), SHELL),
            "## Collectives on gloo",
            "",
            *_shown(measured("collectives_")),
            "## Virtual ranks",
            "",
            *_shown(measured("virtual-ranks_")),
        ]
    )


def glance(
    steps: Sequence[Measured],
    models: Sequence[str] = tuple(MODELS),
    worlds: Sequence[str] = ("1", "2", "4"),
    drivers: Sequence[str] = tuple(DRIVERS),
) -> str:
    """Return fzero over the fastest peer: of the newest day that has it, of its largest table."""
    found: dict[tuple[str, int, str], dict[str, tuple[str, str]]] = {}
    for one in _by_day(steps):
        at = re.fullmatch(r"(\w+), W=(\d+), N=1", one.heading)
        if at is None or at.group(1) not in models or at.group(2) not in worlds:
            continue
        for row in one.rows:
            name = re.fullmatch(rf"({'|'.join(drivers)})(.*)", row[0])
            ratio = re.fullmatch(r"\*\*([\d.]+)\*\* \((\w+)\), ([\d.]+)", row[one.column(PEER)])
            if name and ratio and name.group(2) in STAGES:
                key = name.group(1), int(at.group(2)), at.group(1)
                cell = (
                    f"{ratio.group(1)} [{ratio.group(3)}]",
                    PEERS.get(ratio.group(2), "DeepSpeed"),
                )
                found.setdefault(key, {}).setdefault(name.group(2), cell)
    # Where a stage has one peer it stands in the heading, else in each cell.
    peers = {s: {cells[s][1] for cells in found.values() if s in cells} for s in STAGES}
    only = {stage: ", ".join(names) for stage, names in peers.items() if len(names) == 1}
    head = [": ".join(filter(None, (text, only.get(stage)))) for stage, text in STAGES.items()]
    rows = []
    for (driver, world, model), cells in sorted(found.items()):
        row = [f"{DRIVERS[driver]}, {MODELS[model]}, {world} rank{'s' * (world > 1)}"]
        for stage in STAGES:
            ratio, peer = cells.get(stage, ("-", ""))
            row.append(ratio if stage in only else f"{ratio} {peer}".rstrip())
        rows.append(row)
    return table(["", *head], rows)


def memory(steps: Sequence[Measured]) -> str:
    """Return the most MiB that a rank holds, on 2 ranks with one backward in a step."""
    rows = []
    for model in ("mlp", "gpt"):
        one = next(one for one in _by_day(steps) if one.heading == f"{model}, W=2, N=1")
        most = {row[0]: row[one.column("peak MiB")] for row in one.rows}
        cells = []
        for peer, own in LEVELS.values():
            ours = sorted({most[own], most[own.replace("fzero", "adapter")]}, key=float)
            cells.append(f"{PEERS[peer]} {most[peer]}, **{' to '.join(ours)}**")
        rows.append([MODELS[model], *cells])
    return table(["", *LEVELS], rows)


def _by_day(steps: Sequence[Measured]) -> list[Measured]:
    """Return the newest first, and of a day the largest."""
    largest = sorted(steps, key=lambda one: -len(one.rows))
    return sorted(largest, key=lambda one: one.date, reverse=True)


def _shown(found: Sequence[Measured], columns: dict[str, str] | None = None) -> Iterator[str]:
    """Yield the tables, those of one file after each other; with some of their columns."""
    for path, of_file in itertools.groupby(found, key=lambda one: one.path):
        first, *others = of_file
        label = path.stem.partition("_")[0].removeprefix("step-")
        yield f"### {label}: {first.machine}, {first.date}\n\n    {first.command}\n"
        yield f"{first.versions} All columns: `benchmarks/results/{path.name}`.\n"
        for one in (first, *others):
            names = columns or dict(zip(one.head, one.head, strict=True))
            places = [one.column(name) for name in names]
            if one.heading:
                yield f"**{one.heading}**\n"
            yield table(list(names.values()), [[row[at] for at in places] for row in one.rows])
