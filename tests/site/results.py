"""Read the tables of benchmarks/results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One table of one file."""

    path: Path
    machine: str
    date: str
    heading: str
    command: str
    versions: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> set[str]:
        """The contestants."""
        return {row[0] for row in self.rows}

    def column(self, name: str) -> int:
        """Return the place of a column; the first one of that name."""
        return self.head.index(name)


def measured(kind: str, folder: Path = RESULTS) -> list[Measured]:
    """Return the tables of all files of a kind, the newest first.

    A table that was measured again, with all of its contestants, in a newer file is left out.
    """
    found = [one for path in folder.glob(f"{kind}*.md") for one in _tables_of(path)]
    found.sort(key=lambda one: one.path.name)  # stable: tables of a file stay in their order
    found.sort(key=lambda one: one.date, reverse=True)
    kept: list[Measured] = []
    for one in found:
        again = [
            other
            for other in kept
            if (other.heading, other.head) == (one.heading, one.head) and other.names >= one.names
        ]
        if not again or again[0].date == one.date:
            kept.append(one)
    return kept


def _tables_of(path: Path) -> Iterator[Measured]:
    text = path.read_text(encoding="utf-8")
    _, machine, date = path.stem.split("_")
    command = re.search(r"^    (python .*)$", text, re.MULTILINE)
    versions = re.search(r"^Python [\d.]+, .*$", text, re.MULTILINE)
    assert command and versions, path
    parts = re.split(r"^##+ ", text, flags=re.MULTILINE)
    for part in parts[1:] or [f"\n{text}"]:  # a file with one table has no headings
        heading, _, body = part.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        if len(lines) > 2:
            cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
            yield Measured(
                path=path,
                machine=machine,
                date=date,
                heading=heading,
                command=re.sub(r" --out \S+", "", command.group(1)),
                versions=versions.group(),
                head=cells[0],
                rows=tuple(cells[2:]),
            )
