"""`Plan` and `Comparison`: records of numbers, and their text in columns."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fzero.checkpoint.mirror import mirror_bytes
from fzero.machine.owners import owners_of
from fzero.state import Setup
from fzero.tools._columns import columns
from fzero.tools._units import in_bytes, in_seconds
from fzero.tools.plan._ranks import RankShare, shares_of
from fzero.tools.plan._time import Time
from fzero.transforms.outer_rule import as_inner

Row = tuple[str, ...]
_BAR = 24  # characters of a share of 100 %


class Traffic(NamedTuple):
    """The collectives of one kind, over one axis, that one rank issues in one step."""

    op: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, agree
    axis: str  # its name: "dp" is all ranks; of two dims, "replicate" and "shard"
    count: int
    wire_bytes: int  # that one rank sends, on the ring lower bound


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """What one step takes on each rank. `print(plan)` is a table; so is it in a notebook.

    Shards are padded to one length, so all ranks hold and send the same number of bytes; `ranks`
    tells how many of them are padding on each rank. What a rule for matrices keeps of parameters,
    and sends, is that of the rank that is planned: `rank=`.
    """

    name: str  # of the model
    setups: tuple[Setup, ...]  # of each state: stage, axis, layout, optimizer
    device: str  # what is planned for: "cpu" (and gloo) or "cuda" (and nccl)
    bytes: Mapping[str, int]  # what a rank holds of each kind of buffer, on the device or not
    peak: Mapping[str, int]  # by kind, on the device, when most is alive; empty: not known
    traffic: tuple[Traffic, ...]
    time: Time | None  # None: not known
    part_bytes: int = 0  # what a rank copies into a `Mirror`; 0: its state cannot be saved

    @property
    def world(self) -> int:
        """W, the number of ranks."""
        return self.setups[0].axis.size

    @property
    def stage(self) -> int | tuple[int, ...]:
        """The ZeRO stage; of several states, that of each."""
        stages = tuple(setup.stage for setup in self.setups)
        return stages[0] if len(stages) == 1 else stages

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of tensors on the device of one rank when most are alive; None: not known."""
        return sum(self.peak.values()) if self.peak else None

    @property
    def collectives(self) -> dict[str, int]:
        """How many buffers of one rank cross the ranks in one step, by operation."""
        found: dict[str, int] = {}
        for one in self.traffic:
            found[one.op] = found.get(one.op, 0) + one.count
        return found

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends in one step, on the ring lower bound."""
        return sum(one.wire_bytes for one in self.traffic)

    def mirror_bytes(self, copies: int = 1) -> int:
        """Host memory for each rank of `fzero.checkpoint.Mirror(every=..., copies=copies)`."""
        return mirror_bytes(self.part_bytes, copies)

    @property
    def ranks(self) -> tuple[RankShare, ...]:
        """Elements and padding of each of the W ranks."""
        return shares_of(self.setups)

    def fits(self, nbytes: float) -> bool:
        """Whether the peak is known, and at most `nbytes`."""
        return self.peak_bytes is not None and self.peak_bytes <= nbytes

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON; of the ranks, a summary."""
        return {
            "name": self.name,
            "world": self.world,
            "stage": self.stage,
            "device": self.device,
            "bytes": dict(self.bytes),
            "peak_bytes": self.peak_bytes,
            "peak": dict(self.peak),
            "collectives": [one._asdict() for one in self.traffic],
            "wire_bytes": self.wire_bytes,
            "mirror_bytes": self.mirror_bytes(),
            "ranks": _padding(self),
            "time": None if self.time is None else self.time.to_dict(),
        }

    def __repr__(self) -> str:
        return of_plan(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """Plans of one model side by side; `print(comparison)` is a table."""

    plans: tuple[Plan, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return all of it as plain values, for JSON."""
        return [plan.to_dict() for plan in self.plans]

    def __repr__(self) -> str:
        return of_comparison(self.plans)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def of_plan(plan: Plan, *, bold: bool = False) -> str:
    """Return the tables of one plan."""
    title = f"{plan.name}: stage {plan.stage} on {_world(plan)}, {_device(plan)}"
    blocks = [_mark(title, bold)]
    for heading, rows in _tables(plan):
        lines = columns(rows, numbers=True)
        blocks.append("\n".join([_mark(heading, bold), *(f"  {line}" for line in lines)]))
    return "\n\n".join([*blocks, "\n".join(_notes(plan))])


def of_comparison(plans: Sequence[Plan], *, bold: bool = False) -> str:
    """Return one table with a column for each plan."""
    title = f"{plans[0].name} on {_world(plans[0])}, {_device(plans[0])}" if plans else "no plan"
    return "\n".join([_mark(title, bold), *columns(_compared(plans), numbers=True)])


def _padding(plan: Plan) -> dict[str, int]:
    """Return a summary of `plan.ranks`."""
    ranks = plan.ranks
    return {
        "ranks": len(ranks),
        "most_padding": max(one.updated_padding for one in ranks),
        "ranks_that_update_nothing": sum(one.is_empty for one in ranks),
    }


def _notes(plan: Plan) -> list[str]:
    """Return the notes below the tables."""
    found = _padding(plan)
    outer = [as_inner(setup) for setup in plan.setups if setup.layout.options.outer is not None]
    ruled = [setup for setup in (*plan.setups, *outer) if owners_of(setup) is not None]
    owned = bool(ruled)
    notes = [
        f"Each of {found['ranks']:,} ranks holds as many bytes"
        + (", but for what it keeps, and sends, of the parameters that it owns." if owned else "."),
        f"At most {found['most_padding']:,} of the elements that one updates are padding.",
    ]
    notes += map(_of_owners, ruled)
    empty = found["ranks_that_update_nothing"]
    if empty == found["ranks"]:
        notes.append("Nothing is updated: no parameter learns.")
    elif empty:
        notes.append(f"{empty:,} ranks update nothing: their shards are all padding.")
    if plan.part_bytes:
        held = in_bytes(plan.mirror_bytes())
        notes.append(f"A Mirror with copies=1 takes {held} of host memory for each rank.")
    if plan.peak:
        notes.append("The peak is of tensors without the batch, before what an allocator adds.")
    else:
        notes.append("Without a model, activations, the peak and the time are not known.")
    if plan.time is not None:
        notes.append(f"Time at {plan.time.rates}.")
    return notes


def _of_owners(setup: Setup) -> str:
    """Say how even owners are: in what they compute, and in what they keep."""
    owners = owners_of(setup)
    loads = [] if owners is None else owners.loads()
    costs, kept = zip(*loads, strict=True)
    computes = max(costs) * len(loads) / max(sum(costs), 1)
    rule = " of the outer rule" if setup.optimizer is setup.layout.options.outer else ""
    text = f"Of {len(loads):,} owners{rule}, one computes at most {computes:.2f} times the mean"
    if not sum(kept):
        return f"{text}; they keep nothing whole."
    return f"{text}, and one keeps at most {max(kept) * len(loads) / sum(kept):.2f} times it."


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
    count = sum(one.count for one in plan.traffic)
    sent.append(("in all", f"{count:,}", in_bytes(plan.wire_bytes)))
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
    rows.append(row("sent", lambda plan: in_bytes(plan.wire_bytes)))
    if all(plan.time is not None for plan in plans):
        rows.append(row("time, serial", lambda plan: in_seconds(plan.time.serial_s)))
        rows.append(row("time, overlapped", lambda plan: in_seconds(plan.time.overlapped_s)))
    return rows


def _share(share: float) -> str:
    return f"{share:6.1%} {'#' * round(share * _BAR):<{_BAR}}"


def _world(plan: Plan) -> str:
    replicas = plan.setups[0].replicas
    shards = plan.world // replicas
    return f"{replicas:,} x {shards:,} ranks" if replicas > 1 else f"{plan.world:,} ranks"


def _device(plan: Plan) -> str:
    return {"cpu": "cpu over gloo", "cuda": "cuda over nccl"}[plan.device]


def _mark(text: str, bold: bool) -> str:
    return f"\033[1m{text}\033[0m" if bold else text
