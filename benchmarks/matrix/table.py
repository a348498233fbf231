"""The matrix as Markdown: who agrees where, and the first number that differs elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fzero.tools.certify import CellResult

LEGEND = """\
An entry is the number of cells that agree with the step of one process, of those that the
contestant supports: in three windows (each backward reduced by itself; one reduction for all;
accumulation that divides by their number), clipped and not. "=" if they are all equal bit for bit
where sums are exact, which is without clipping in fp64 and fp32. "-": not supported. The model has
whole numbers, a tied, a frozen and an unused parameter (no scalar, which FSDP2 does not take; all
ranks use the same layers); the optimizer is SGD with momentum.
Compared are the losses of each rank, the gradient that the optimizer is given, its norm, and the
parameters after two updates, on every rank.
"""


def markdown(world: int, backwards: int, found: Mapping[str, Sequence[CellResult]]) -> str:
    """One table: contestants and stages down, precisions across."""
    precisions = list(dict.fromkeys(c.at["precisions"] for cells in found.values() for c in cells))
    stages = sorted({c.at["stages"] for cells in found.values() for c in cells})
    lines = [f"## {world} ranks, {backwards} backwards in an update", ""]
    lines += [f"| | stage | {' | '.join(precisions)} |", "|---" * (len(precisions) + 2) + "|"]
    notes: list[str] = []
    for name, cells in found.items():
        for stage in stages:
            row = [c for c in cells if c.at["stages"] == stage]
            if all(c.unsupported for c in row):
                continue
            entries = [_entry([c for c in row if c.at["precisions"] == p]) for p in precisions]
            lines.append(f"| {name} | {stage} | {' | '.join(entries)} |")
        notes += _notes(name, cells)
    return "\n".join([*lines, "", *notes, ""])


def _entry(cells: Sequence[CellResult]) -> str:
    ran = [cell for cell in cells if not cell.unsupported]
    if not ran:
        return "-"
    good = [cell for cell in ran if cell.passed]
    plain = [cell for cell in ran if cell.at["clipping"] == "off"]
    exact = bool(plain) and all(cell.exact and cell.passed for cell in plain)
    return f"{len(good)} of {len(ran)}{' =' if exact and len(good) == len(ran) else ''}"


def _notes(name: str, cells: Sequence[CellResult]) -> list[str]:
    """What differs and what is not supported, each reason once with the first cell that has it."""
    told: dict[str, tuple[int, str]] = {}
    for cell in cells:
        where = ", ".join(
            f"{axis} {cell.at[axis]}" for axis in ("stages", "precisions", "windows", "clipping")
        )
        if cell.unsupported:
            key, text = f"not supported: {cell.unsupported}", ""
        elif cell.error:
            key, text = f"raised: {cell.error.splitlines()[0][:160]}", f" (first: {where})"
        elif cell.failed:
            wrong = [check for check in cell.checks if check.difference]
            key = f"differs in {', '.join(check.what for check in wrong)}"
            text = f" (first: {where}; {wrong[0].what}: {wrong[0].difference})"
        else:
            continue
        count, first = told.get(key, (0, text))
        told[key] = (count + 1, first)
    return [f"- {name}, {count} cells: {key}{text}." for key, (count, text) in told.items()]
