"""The checks, and the report of their results, as a table and as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.tools._columns import columns
from fzero.tools.doctor._check import VERDICTS, CollectiveCheck, Finding
from fzero.tools.doctor._ranks import findings
from fzero.tools.doctor._subjects import DTYPES, FLOATS, SUBJECTS, CollectiveSubject
from fzero.tools.doctor._transforms import TRANSFORMS

WORLD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A check, and its finding."""

    check: CollectiveCheck
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The results; true if all of them are right. `text()` has the table."""

    cells: tuple[CheckResult, ...]

    def __bool__(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> tuple[CheckResult, ...]:
        """The cells that are not right."""
        return tuple(cell for cell in self.cells if cell.finding.verdict != "right")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        cells = [
            {
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

    def text(self) -> str:
        """Return the table, the faults, and how many cells have which verdict."""
        counts = Counter(cell.finding.verdict for cell in self.cells)
        told = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
        return "\n".join(
            [
                f"torch {torch.__version__}, gloo, {WORLD} ranks, CPU tensors",
                "",
                *_table(self.cells),
                "",
                *_described(self.faults),
                f"fzero's collectives: {told}.",
                f"This installation {'is sound' if self else 'has FAULTS'}.",
            ]
        )


def examine(
    subjects: Sequence[CollectiveSubject] = SUBJECTS,
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    timeout_s: float = 60.0,
) -> DoctorReport:
    """Run every collective under every transform in every dtype, on ranks that are started for it.

    Args:
        subjects: the collectives, with their formulas. Without them, those of fzero.
        dtypes: of their inputs. Integers have no derivatives, and no mean.
        timeout_s: how long a check may take before it counts as hung.

    Returns:
        The report.

    Raises:
        AxisError: where ranks cannot start.
    """
    checks = [
        CollectiveCheck(subject=subject, transform=transform, dtype=dtype)
        for subject in subjects
        for transform in TRANSFORMS
        for dtype in dtypes
        if dtype in FLOATS or (transform == "value" and subject.op != "avg")
    ]
    found = findings(checks, world=WORLD, timeout_s=timeout_s)
    pairs = zip(checks, found, strict=True)
    return DoctorReport(cells=tuple(CheckResult(check=one, finding=of) for one, of in pairs))


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


def _table(cells: Sequence[CheckResult]) -> Iterator[str]:
    """Yield lines of at most 80 columns: a collective, below it its transforms, dtypes beside."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        at = cell.check
        found.setdefault((at.subject.name, at.transform), {})[at.dtype] = cell.finding.verdict
    heads = list(dict.fromkeys(head for row in found.values() for head in row))
    rows = [[f"  {by}", *(row.get(head, "-") for head in heads)] for (_, by), row in found.items()]
    header, *lines = columns([["", *heads], *rows])
    yield header
    before = ""
    for (name, _), line in zip(found, lines, strict=True):
        if name != before:
            yield name
        before = name
        yield line
