"""Turn measured rows into a Markdown table and into a verdict on the losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from step.measure import Plan, Row

LOSS_TOLERANCE = 1e-5  # of the reference loss; float32 sums in another order stay below 1e-6
BF16_TOLERANCE = 1e-2  # of it, for those that compute in bfloat16
_HEADER = (
    "contestant",
    "stage",
    "reduces",
    "median ms",
    "min",
    "/ plain",
    "/ ddp",
    "/ fastest peer of the stage",
    "collectives: calls / payload MiB",
    "ring MiB sent per rank",
    "loopback MiB, all ranks",
    "resident MiB",
    "peak MiB",
    "loss error",
)


def median_ms(row: Row) -> float:
    """Median over rounds of the slowest rank."""
    return statistics.median(row.times_ms)


def loss_error(row: Row, reference: Sequence[float]) -> float:
    """max over the checked steps of |loss - reference| / |reference|."""
    pairs = zip(row.losses, reference, strict=True)
    return max(abs(loss - want) / abs(want) for loss, want in pairs)


def disagreements(plan: Plan, rows: Sequence[Row], reference: Sequence[float]) -> list[str]:
    """What is wrong with the losses, one line each; empty if all is well.

    At W > 1 `plain`, which does not communicate, must disagree: if it did not, the check would
    be blind to a contestant that forgot to reduce.
    """
    found: list[str] = []
    for row in rows:
        error = loss_error(row, reference)
        alone = row.contestant == "plain" and plan.world_size > 1
        if alone and error <= LOSS_TOLERANCE:
            found.append(
                f"plain agrees with the reference ({error:.1e}) although it does not communicate: "
                "the check of the losses cannot see a missing reduction"
            )
        allowed = BF16_TOLERANCE if row.stage.endswith("bf16") else LOSS_TOLERANCE
        if not alone and not error <= allowed:
            found.append(
                f"{row.contestant}: losses {_numbers(row.losses)} but one process has "
                f"{_numbers(reference)}: off by {error:.1e}, allowed {allowed:.0e}"
            )
    return found


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6f}" for value in values)


def _peers(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Those that agree with `row` on the stage and on when gradients are reduced."""
    kind = (row.stage, row.once)
    return [other for other in rows if (other.stage, other.once) == kind and not _is_ours(other)]


def _against_peers(row: Row, rows: Sequence[Row]) -> str:
    """`**ratio of medians** (peer), ratio of the best rounds`, to the fastest peer of each."""
    peers = _peers(row, rows)
    if not _is_ours(row) or not peers:
        return "-"
    peer = min(peers, key=median_ms)
    best = min(row.times_ms) / min(min(other.times_ms) for other in peers)
    return f"**{_ratio(row, peer)}** ({peer.contestant}), {best:.2f}"


def _is_ours(row: Row) -> bool:
    return row.contestant.startswith(("fzero", "adapter"))


def _mib(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:.1f}"


def _ratio(row: Row, other: Row | None) -> str:
    return "-" if other is None else f"{median_ms(row) / median_ms(other):.2f}"


def _cells(row: Row, rows: Sequence[Row], plan: Plan, reference: Sequence[float]) -> list[str]:
    by_name = {other.contestant: other for other in rows}
    ring_bytes = sum(kind.ring_bytes(plan.world_size) for kind in row.traffic)
    calls = ", ".join(f"{one.kind} {one.calls} / {_mib(one.payload_bytes)}" for one in row.traffic)
    alone = row.stage == "none" and plan.world_size > 1
    return [
        row.contestant,
        row.stage,
        "never" if row.stage == "none" else "once" if row.once else "each backward",
        f"**{median_ms(row):.1f}**",
        f"{min(row.times_ms):.1f}",
        _ratio(row, by_name.get("plain")),
        _ratio(row, by_name.get("ddp")),
        _against_peers(row, rows),
        calls or "none",
        _mib(ring_bytes),
        _mib(row.loopback_bytes),
        _mib(row.memory.resident_bytes),
        _mib(row.memory.peak_bytes),
        f"{loss_error(row, reference):.0e}" + (" (own data only)" if alone else ""),
    ]


def markdown(plan: Plan, rows: Sequence[Row], reference: Sequence[float]) -> str:
    """The table of one plan, with its heading."""
    lines = [
        f"### {plan.model}, W={plan.world_size}, N={plan.backwards}",
        "",
        "| " + " | ".join(_HEADER) + " |",
        "|---" * len(_HEADER) + "|",
    ]
    for row in rows:
        lines.append("| " + " | ".join(_cells(row, rows, plan, reference)) + " |")
    return "\n".join(lines) + "\n"
