"""From rows to a Markdown table, and whose losses are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gpu.measure import BLOCK, Row

LOSS_TOLERANCE = 2e-2
"""Everyone rounds to bf16, at other places: 2^-8, and a few steps of it."""


def markdown(rows: Sequence[Row]) -> str:
    """One line for each contestant, in the order of the first pass."""
    head = ["contestant", "step", f"of {BLOCK}", "host", "ratio", "resident MiB", "peak MiB"]
    lines = [f"| {' | '.join([*head, 'loss error'])} |", "|---" * (len(head) + 1) + "|"]
    plain = _of(rows, "plain")
    base = median(ms for row in plain for ms in row.blocks_ms)
    for name in dict.fromkeys(row.name for row in rows):
        own = _of(rows, name)
        blocks = median(ms for row in own for ms in row.blocks_ms)
        cells = [
            name,
            _times([row.steps_ms for row in own]),
            _times([row.blocks_ms for row in own]),
            f"{median(ms for row in own for ms in row.enqueued_ms):.2f}",
            f"{blocks / base:.3f}",
            f"{max(row.resident_bytes for row in own) / 2**20:.0f}",
            f"{max(row.peak_bytes for row in own) / 2**20:.0f}",
            f"{_loss_error(rows, name):.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def disagreements(rows: Sequence[Row]) -> list[str]:
    """A line for each contestant whose losses are not plain PyTorch's, or do not fall."""
    found = []
    for name in dict.fromkeys(row.name for row in rows):
        losses = _of(rows, name)[0].losses
        if not _loss_error(rows, name) <= LOSS_TOLERANCE:  # so that NaN is wrong
            found.append(
                f"LOSSES DISAGREE: {name} has {losses}, plain {_of(rows, 'plain')[0].losses}"
            )
        if not losses[-1] < losses[0]:
            found.append(f"THE LOSS DOES NOT FALL: {name} has {losses}")
    return found


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.name == name]


def _times(passes: Sequence[Sequence[float]]) -> str:
    whole = median(ms for each in passes for ms in each)
    return f"{whole:.2f} ({', '.join(f'{median(each):.2f}' for each in passes)})"


def _loss_error(rows: Sequence[Row], name: str) -> float:
    wanted = _of(rows, "plain")[0].losses
    return max(
        abs(a - b) / abs(b)
        for row in _of(rows, name)
        for a, b in zip(row.losses, wanted, strict=True)
    )
