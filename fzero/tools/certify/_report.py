"""The report of `certify`: for every cell, the checks, and the first difference."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from fzero.tools._columns import columns
from fzero.tools.certify._axes import AXES
from fzero.tools.certify._compare import Check

CHECKS = ("loss", "gradient", "norm", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The result of one cell, with its value on each axis.

    It has `checks`, or an `error` (what a rank raised), or it is `unsupported` (why, in a line: the
    factory raised NotImplementedError, or one process cannot compute it). With `checks`, the
    `error` says that ranks have other bits of one parameter.
    """

    at: dict[str, str]  # axis -> value
    checks: tuple[Check, ...] = ()
    error: str = ""
    unsupported: str = ""

    @property
    def passed(self) -> bool:
        """Whether all agrees; an unsupported cell neither passes nor fails."""
        return not self.failed and not self.unsupported

    @property
    def failed(self) -> bool:
        """Whether something differs or was raised."""
        return bool(self.error) or any(check.difference for check in self.checks)

    @property
    def exact(self) -> bool:
        """Whether gradients and parameters were compared bit for bit."""
        bounds = [check.bound for check in self.checks if check.what in ("gradient", "update")]
        return bool(bounds) and not any(bounds)

    def agrees(self, what: str) -> bool | None:
        """Whether "loss", "gradient", "norm" or "update" agrees; None if it was not compared."""
        found = {check.what: check for check in self.checks if check.compared}
        return found[what].difference is None if what in found else None

    def verdict(self, what: str) -> str:
        """Return the check in a few characters: "=", its bound, "DIFFERS" or "-"."""
        check = {check.what: check for check in self.checks}.get(what)
        if check is not None and check.difference:
            return "DIFFERS"
        if self.error:
            return "ERROR"
        if check is None or not check.compared:
            return "-"
        return f"{check.bound:.0e}" if check.bound else "="

    def describe(self) -> str:
        """Return the values on all axes, and a line for each difference or error."""
        lines = [", ".join(f"{name} {value}" for name, value in self.at.items())]
        lines += [f"  {c.what}: {c.difference}" for c in self.checks if c.difference]
        lines += ["  " + line for line in (self.error or self.unsupported).splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The matrix. `print(report)` is its table; it is true if cells passed and none failed."""

    name: str  # of the model
    coverage: str  # which cells of the product there are
    cells: tuple[CellResult, ...]

    def __bool__(self) -> bool:
        return not self.failures and any(cell.passed for cell in self.cells)

    @property
    def failures(self) -> tuple[CellResult, ...]:
        """The cells in which something differs or was raised."""
        return tuple(cell for cell in self.cells if cell.failed)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        cells = [
            {
                "at": cell.at,
                "passed": cell.passed,
                "exact": cell.exact,
                "checks": [asdict(check) for check in cell.checks],
                "error": cell.error,
                "unsupported": cell.unsupported,
            }
            for cell in self.cells
        ]
        return {"name": self.name, "coverage": self.coverage, "cells": cells, "passed": bool(self)}

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The header and the cells as text: axes that vary, then the checks."""
        varying = [a for a in AXES if len({cell.at[a.name] for cell in self.cells}) > 1]
        header = [axis.head for axis in varying] + list(CHECKS)
        rows = []
        for cell in self.cells:
            here = [cell.at[axis.name] for axis in varying]
            if cell.unsupported:
                rows.append([*here, *(["not supported"] * len(CHECKS))])
            else:
                rows.append([*here, *map(cell.verdict, CHECKS)])
        return header, rows

    def summary(self) -> str:
        """How many cells there are, and how they ended."""
        ran = [cell for cell in self.cells if not cell.unsupported]
        good = [cell for cell in ran if cell.passed]
        text = f"{len(good)} of {len(ran)} cells give the step of one process"
        text += f", {sum(cell.exact for cell in good)} of them bit for bit."
        skipped = len(self.cells) - len(ran)
        return text + (f" {skipped} are not supported." if skipped else "")

    def __repr__(self) -> str:
        fixed = [
            f"{axis.head} {self.cells[0].at[axis.name]}"
            for axis in AXES
            if len({cell.at[axis.name] for cell in self.cells}) == 1
        ]
        header, rows = self.rows()
        lines = [f"{self.name}: {self.coverage}"]
        lines += [f"In all cells: {', '.join(fixed)}."] if fixed else []
        lines += ["", *columns([header, *rows]), "", _LEGEND, ""]
        lines += [cell.describe() for cell in self.failures]
        reasons = Counter(cell.unsupported for cell in self.cells if cell.unsupported)
        lines += [f"not supported, {count} cells: {why}" for why, count in reasons.items()]
        return "\n".join([*lines, self.summary()])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


_LEGEND = (
    "=: equal bit for bit, as all sums are exact. A number: equal within that times the largest\n"
    "number of the model, what re-ordered sums may change in this precision. -: not told."
)
