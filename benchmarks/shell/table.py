"""Turn measured rows into a Markdown table and into a verdict on the losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from shell.measure import Plan, Row

TOLERANCE = 1e-3  # of the change of the sum of all parameters: the sum itself is 100 times that
_HEADER = (
    "contestant",
    "stage",
    "backward us/param",
    "minus plain",
    "min",
    "/ fastest peer",
    "update us/param",
    "minus plain",
    "whole step ms",
    "buckets",
    "collectives",
    "loss error",
)


def disagreements(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """What is wrong with the losses, one line each. At W > 1 `plain` must be wrong."""
    found: list[str] = []
    for row in rows:
        alone = row.contestant == "plain" and plan.world_size > 1
        if alone == (row.loss_error <= TOLERANCE):
            wanted = f"more than {TOLERANCE:.0e}" if alone else f"at most {TOLERANCE:.0e}"
            where = f"{row.contestant}, {plan.count} parameters, W={plan.world_size}"
            found.append(f"{where}: loss error {row.loss_error:.1e}, must be {wanted}")
    return found


def heading(plan: Plan) -> str:
    """What is special about this table."""
    units = f" in {plan.parts} modules" if plan.parts > 1 else " in one module"
    return f"### {plan.kind}: {plan.count:,} parameters{units}, W={plan.world_size}"


def markdown(plan: Plan, rows: Sequence[Row]) -> str:
    """The table of one plan, with its heading."""
    lines = [heading(plan), "", "| " + " | ".join(_HEADER) + " |", "|---" * len(_HEADER) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cells(row, rows, plan.count)) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: Row, rows: Sequence[Row], count: int) -> list[str]:
    plain = next(other for other in rows if other.contestant == "plain")
    calls = ", ".join(f"{one.kind} {one.calls}" for one in row.traffic)
    whole = [a + b for a, b in zip(row.backward_ms, row.update_ms, strict=True)]
    return [
        row.contestant,
        row.stage,
        f"{_us(row.backward_ms, count):.2f}",
        f"**{_us(row.backward_ms, count) - _us(plain.backward_ms, count):.2f}**",
        f"{(min(row.backward_ms) - min(plain.backward_ms)) * 1e3 / count:.2f}",
        _against_peers(row, rows),
        f"{_us(row.update_ms, count):.2f}",
        f"{_us(row.update_ms, count) - _us(plain.update_ms, count):.2f}",
        f"{statistics.median(whole):.2f}",
        "-" if row.buckets is None else str(row.buckets),
        calls or "none",
        f"{row.loss_error:.0e}" + (" (own data)" if row.loss_error > TOLERANCE else ""),
    ]


def _us(times_ms: Sequence[float], count: int) -> float:
    return statistics.median(times_ms) * 1e3 / count


def _against_peers(row: Row, rows: Sequence[Row]) -> str:
    """The whole step's median over that of the fastest peer of the stage, and its name."""
    if not row.contestant.startswith("adapter"):
        return "-"
    peers = [
        other
        for other in rows
        if other.stage == row.stage and not other.contestant.startswith("adapter")
    ]
    if not peers:
        return "-"
    peer = min(peers, key=_step_ms)
    return f"{_step_ms(row) / _step_ms(peer):.2f} ({peer.contestant})"


def _step_ms(row: Row) -> float:
    whole = [a + b for a, b in zip(row.backward_ms, row.update_ms, strict=True)]
    return statistics.median(whole)
