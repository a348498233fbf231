"""Plans as text and as HTML: plain columns, which a terminal may be given some bold in."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fzero._columns import columns
from fzero._units import in_bytes, in_seconds

if TYPE_CHECKING:
    from fzero.plan._record import Plan

Row = tuple[str, ...]
_BAR = 24  # characters of a share of 100 %


def of_plan(plan: Plan, *, bold: bool = False) -> str:
    """Return the tables of one plan."""
    blocks = [_mark(title_of(plan), bold)]
    for heading, rows in _tables(plan):
        lines = columns(rows, numbers=True)
        blocks.append("\n".join([_mark(heading, bold), *(f"  {line}" for line in lines)]))
    return "\n\n".join([*blocks, "\n".join(notes_of(plan))])


def of_comparison(plans: Sequence[Plan], *, bold: bool = False) -> str:
    """Return one table with a column for each plan."""
    title = f"{plans[0].name} on {_world(plans[0])}, {_device(plans[0])}" if plans else "no plan"
    return "\n".join([_mark(title, bold), *columns(_compared(plans), numbers=True)])


def as_html(plan: Plan) -> str:
    """Return the tables of one plan."""
    parts = [f"<b>{html.escape(title_of(plan))}</b>"]
    parts += [f"{html.escape(heading)}{_html_table(rows)}" for heading, rows in _tables(plan)]
    return "".join([*parts, *(f"<div>{html.escape(note)}</div>" for note in notes_of(plan))])


def comparison_as_html(plans: Sequence[Plan]) -> str:
    """Return one table with a column for each plan."""
    return _html_table(_compared(plans))


def title_of(plan: Plan) -> str:
    """The model, the ranks, the stage and the device."""
    return f"{plan.name}: stage {plan.stage} on {_world(plan)}, {_device(plan)}"


def padding_of(plan: Plan) -> dict[str, int]:
    """A summary of `plan.ranks`."""
    ranks = plan.ranks
    return {
        "ranks": len(ranks),
        "most_padding": max(one.updated_padding for one in ranks),
        "ranks_that_update_nothing": sum(one.is_empty for one in ranks),
    }


def notes_of(plan: Plan) -> list[str]:
    """What is to be read with the tables."""
    found = padding_of(plan)
    notes = [
        f"Each of {found['ranks']:,} ranks holds as many bytes.",
        f"At most {found['most_padding']:,} of the elements that one updates are padding.",
    ]
    empty = found["ranks_that_update_nothing"]
    if empty == found["ranks"]:
        notes.append("Nothing is updated: no parameter learns.")
    elif empty:
        notes.append(f"{empty:,} ranks update nothing: their shards are all padding.")
    if plan.peak:
        notes.append("The peak is of tensors without the batch, before what an allocator adds.")
    else:
        notes.append("Without a model, activations, the peak and the time are not known.")
    if plan.time is not None:
        notes.append(f"Time at {plan.time.rates}.")
    return notes


def _tables(plan: Plan) -> Iterable[tuple[str, list[Row]]]:
    held = [(kind, in_bytes(n), f"{n:,}") for kind, n in plan.bytes.items() if n]
    yield "a rank holds", held
    if plan.peak:
        total = plan.peak_bytes or 1
        peak = sorted(plan.peak.items(), key=lambda item: -item[1])
        rows = [(kind, in_bytes(n), f"{n:,}", _share(n / total)) for kind, n in peak]
        rows.append(("in all", in_bytes(total), f"{total:,}", _share(1.0)))
        yield "alive at the peak, on the device", rows
    sent = [
        (f"{one.op} ({one.axis})", f"{one.count:,}", in_bytes(one.wire_bytes))
        for one in plan.traffic
    ]
    sent.append(("in all", f"{sum(one.count for one in plan.traffic):,}", _sent(plan)))
    yield "collectives of a step, and bytes that a rank sends", sent
    if plan.time is not None:
        time = plan.time
        rows = [
            (name, in_seconds(seconds), _share(time.shares[name]))
            for name, seconds in time.terms.items()
        ]
        rows.append(("one after the other", in_seconds(time.serial_s), ""))
        rows.append(("communication beside compute", in_seconds(time.overlapped_s), ""))
        yield "estimated time of a step", rows


def _compared(plans: Sequence[Plan]) -> list[Row]:
    def row(name: str, cell: Any) -> Row:
        return (name, *(cell(plan) for plan in plans))

    kinds = dict.fromkeys(kind for plan in plans for kind, n in plan.bytes.items() if n)
    ops = dict.fromkeys(op for plan in plans for op in plan.collectives)
    rows = [row("stage", lambda plan: str(plan.stage))]
    rows += [row(kind, lambda plan, kind=kind: in_bytes(plan.bytes.get(kind, 0))) for kind in kinds]
    rows.append(row("peak", lambda plan: in_bytes(plan.peak_bytes) if plan.peak else "not known"))
    rows += [row(op, lambda plan, op=op: f"{plan.collectives.get(op, 0):,}") for op in ops]
    rows.append(row("sent", _sent))
    if all(plan.time is not None for plan in plans):
        rows.append(row("time, serial", lambda plan: in_seconds(plan.time.serial_s)))
        rows.append(row("time, overlapped", lambda plan: in_seconds(plan.time.overlapped_s)))
    return rows


def _share(share: float) -> str:
    return f"{share:6.1%} {'#' * round(share * _BAR):<{_BAR}}"


def _sent(plan: Plan) -> str:
    return in_bytes(plan.wire_bytes)


def _world(plan: Plan) -> str:
    replicas = plan.setups[0].replicas
    shards = plan.world // replicas
    return f"{replicas:,} x {shards:,} ranks" if replicas > 1 else f"{plan.world:,} ranks"


def _device(plan: Plan) -> str:
    return {"cpu": "cpu over gloo", "cuda": "cuda over nccl"}[plan.device]


def _mark(text: str, bold: bool) -> str:
    return f"\033[1m{text}\033[0m" if bold else text


def _html_table(rows: Sequence[Row]) -> str:
    style = "style='text-align:right;white-space:pre'"
    lines = (
        "<tr>" + "".join(f"<td {style}>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{''.join(lines)}</table>"
