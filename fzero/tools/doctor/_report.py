"""The matrix of checks, and the report of their results, as tables and as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.tools._columns import columns
from fzero.tools.doctor._check import VERDICTS, CollectiveCheck, Finding
from fzero.tools.doctor._ranks import findings
from fzero.tools.doctor._subjects import (
    DTYPES,
    FLOATS,
    OF_FZERO,
    OF_THE_BACKEND,
    CollectiveSubject,
)
from fzero.tools.doctor._transforms import TRANSFORMS

WORLD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the matrix: collectives with the same transforms and dtypes."""

    title: str
    subjects: tuple[CollectiveSubject, ...]
    transforms: tuple[str, ...]
    dtypes: tuple[str, ...]
    tolerated: tuple[str, ...]  # the verdicts that are no fault of this installation

    def checks(self) -> list[CollectiveCheck]:
        """Return the cells: integers have no derivatives, and no mean."""
        return [
            CollectiveCheck(subject=subject, transform=transform, dtype=dtype)
            for subject in self.subjects
            for transform in self.transforms
            for dtype in self.dtypes
            if dtype in FLOATS or (transform == "value" and subject.op != "avg")
        ]


SECTIONS = {
    "fzero": Section(
        title="fzero's collectives",
        subjects=OF_FZERO,
        transforms=tuple(TRANSFORMS),
        dtypes=tuple(DTYPES),
        tolerated=("right",),
    ),
    "backend": Section(
        title="Reduce operations of gloo, without gradients",
        subjects=OF_THE_BACKEND,
        transforms=("value",),
        dtypes=tuple(DTYPES),
        tolerated=("right", "refused"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A check, its section, and its finding."""

    section: str
    check: CollectiveCheck
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The results; true if no cell is a fault of this installation. `text()` has the tables."""

    sections: Mapping[str, Section]
    cells: tuple[CheckResult, ...]

    def __bool__(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> tuple[CheckResult, ...]:
        """The cells with a verdict that their section does not tolerate."""
        return tuple(
            cell
            for cell in self.cells
            if cell.finding.verdict not in self.sections[cell.section].tolerated
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        cells = [
            {
                "section": cell.section,
                "collective": cell.check.subject.name,
                "transform": cell.check.transform,
                "dtype": cell.check.dtype,
                "verdict": cell.finding.verdict,
                "seen": cell.finding.seen,
            }
            for cell in self.cells
        ]
        head = {"torch": torch.__version__, "backend": "gloo", "ranks": WORLD}
        return {**head, "sound": bool(self), "cells": cells}

    def text(self, *, color: bool = False) -> str:
        """Return the tables, the faults, and a line for each section."""
        lines = [f"torch {torch.__version__}, gloo, {WORLD} ranks, CPU tensors"]
        for name, section in self.sections.items():
            cells = [cell for cell in self.cells if cell.section == name]
            lines += ["", section.title, "", *_table(cells, color)]
        lines += ["", *_described(self.faults)]
        for name, section in self.sections.items():
            counts = Counter(c.finding.verdict for c in self.cells if c.section == name)
            found = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
            lines.append(f"{section.title}: {found}.")
        lines.append("This installation is sound." if self else "This installation has FAULTS.")
        return "\n".join(lines)


def examine(sections: Mapping[str, Section] = SECTIONS, *, timeout_s: float = 60.0) -> DoctorReport:
    """Run the checks of all sections on ranks that are started for it.

    Args:
        sections: what to examine, by name.
        timeout_s: how long a check may take before it counts as hung.

    Returns:
        The report.

    Raises:
        AxisError: where ranks cannot start.
    """
    named = [(name, check) for name, section in sections.items() for check in section.checks()]
    found = findings([check for _, check in named], world=WORLD, timeout_s=timeout_s)
    cells = tuple(
        CheckResult(section=name, check=check, finding=finding)
        for (name, check), finding in zip(named, found, strict=True)
    )
    return DoctorReport(sections=sections, cells=cells)


def _described(cells: Sequence[CheckResult]) -> list[str]:
    """Return lines with faults and their findings; dtypes with equal findings share a line."""
    found: dict[tuple[str, str, Finding], list[str]] = {}
    for cell in cells:
        at = cell.check
        found.setdefault((at.subject.name, at.transform, cell.finding), []).append(at.dtype)
    return [
        f"FAULT: {name}, {transform}, {' '.join(dtypes)}: {finding.verdict}: {finding.seen}"
        for (name, transform, finding), dtypes in found.items()
    ]


def _table(cells: Sequence[CheckResult], color: bool) -> Iterator[str]:
    """Yield the lines of one section, of at most 80 columns: dtypes side by side.

    The name of a collective has a line of its own, and its transforms follow, if there are several.
    """
    one_transform = len({cell.check.transform for cell in cells}) == 1
    found: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        at = cell.check
        row = ("", at.subject.name) if one_transform else (at.subject.name, f"  {at.transform}")
        found.setdefault(row, {})[at.dtype] = cell.finding.verdict
    heads = list(dict.fromkeys(head for row in found.values() for head in row))
    rows = [[name, *(by.get(head, "-") for head in heads)] for (_, name), by in found.items()]
    lines = columns([["", *heads], *rows], paint=_paint if color else str)
    before = ""
    for above, line in zip(["", *(above for above, _ in found)], lines, strict=True):
        if above != before:
            yield above
        before = above
        yield line


_COLORS = {"right": 32, "refused": 33, "zero": 31, "wrong": 31, "crashed": 31, "hung": 31}


def _paint(text: str) -> str:
    code = _COLORS.get(text.strip())
    return text if code is None else f"\x1b[{code}m{text}\x1b[0m"
