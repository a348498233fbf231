"""The tables of docs/performance.md, of what benchmarks/results has."""

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
STAGES = {"0": "stage 0", "1": "1", "3": "3", "3_keep": "3, kept"}
DRIVERS = {"adapter": "engine", "fzero": "functional"}


def tables() -> str:
    """Return all of them, in Markdown."""
    steps = measured("step-")
    return "\n".join(
        [
            "## At a glance",
            "",
            "The median time of a step over that of the fastest peer at the same stage, and in "
            "brackets the best rounds; one backward in a step. Below 1 fzero is faster.",
            "",
            glance(steps),
            "## Steps",
            "",
            *_shown(steps, STEP),
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


def glance(steps: Sequence[Measured]) -> str:
    """Return fzero over the fastest peer: of the newest day that has it, of its largest table."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    largest = sorted(steps, key=lambda one: -len(one.rows))
    for one in sorted(largest, key=lambda one: one.date, reverse=True):
        at = re.fullmatch(r"(\w+), W=(\d+), N=1", one.heading)
        if at is None:
            continue
        for row in one.rows:
            name = re.fullmatch(r"(adapter|fzero)(.*)", row[0])
            ratio = re.fullmatch(r"\*\*([\d.]+)\*\* \((\w+)\), ([\d.]+)", row[one.column(PEER)])
            if name and ratio and name.group(2) in STAGES:
                key = DRIVERS[name.group(1)], at.group(1), at.group(2)
                cell = f"{ratio.group(1)} [{ratio.group(3)}] {ratio.group(2)}"
                found.setdefault(key, {}).setdefault(name.group(2), cell)
    rows = [
        [f"{driver}, {model}, {world} ranks", *(cells.get(stage, "-") for stage in STAGES)]
        for (driver, model, world), cells in sorted(found.items())
    ]
    return table(["", *STAGES.values()], rows)


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
