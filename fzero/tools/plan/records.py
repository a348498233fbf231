"""What a plan is: traffic, times and shares of ranks as numbers, and their text in columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.checkpoint.mirror import mirror_bytes
from fzero.errors.check import is_positive, require
from fzero.machine.owners import owners_of
from fzero.state import Placement, Setup
from fzero.tools.columns import ShownAsText, columns, in_bytes, in_seconds
from fzero.transforms.local import as_inner

Row = tuple[str, ...]
_BAR = 24  # characters of a share of 100 %


class Traffic(NamedTuple):
    """The collectives of one kind, over one axis, that one rank issues in one step."""

    op: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, agree
    axis: str  # its name: "dp" is all ranks; of two dims, "replicate" and "shard"
    count: int
    wire_bytes: int  # that one rank sends, on the ring lower bound


class RankShare(NamedTuple):
    """The elements that one rank holds, without and with padding."""

    rank: int
    params: int  # elements of parameters
    params_padding: int
    updated: int  # of trainable ones, for which it has gradients and optimizer states
    updated_padding: int

    @property
    def is_empty(self) -> bool:
        """Whether this rank updates nothing: its trainable part is all padding."""
        return self.updated == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one device and its link. The defaults are round numbers, not measured.

    link_bytes_per_s: that one rank sends.
    memory_bytes_per_s: read and written by the device.
    flops_per_s: of matrix products, in the dtype of the model.
    latency_s: of one collective, before its first byte.

    Raises `LayoutError` for what is no positive number.
    """

    link_bytes_per_s: float = 50e9
    memory_bytes_per_s: float = 2e12
    flops_per_s: float = 400e12
    latency_s: float = 20e-6

    def __post_init__(self) -> None:
        """Check that each rate is a positive number."""
        for field in fields(self):
            require(field.name, getattr(self, field.name), is_positive, "a number: 50e9")

    def __str__(self) -> str:
        return (
            f"{self.flops_per_s / 1e12:g} TFLOP/s, memory {self.memory_bytes_per_s / 1e9:g} GB/s, "
            f"link {self.link_bytes_per_s / 1e9:g} GB/s, {self.latency_s * 1e6:g} us a collective"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """The seconds of one step by term, each as if it ran alone.

    compute: operations that take longer to compute than to read and write.
    memory: all others.
    link: the bytes on the wire.
    latency: the collectives, however small.
    """

    compute_s: float
    memory_s: float
    link_s: float
    latency_s: float
    rates: Rates

    @property
    def terms(self) -> dict[str, float]:
        """The seconds of each term."""
        return {
            name: getattr(self, f"{name}_s") for name in ("compute", "memory", "link", "latency")
        }

    @property
    def shares(self) -> dict[str, float]:
        """The share of each term in `serial_s`."""
        total = self.serial_s or 1.0
        return {name: seconds / total for name, seconds in self.terms.items()}

    @property
    def serial_s(self) -> float:
        """Without any overlap: the sum of all terms."""
        return sum(self.terms.values())

    @property
    def overlapped_s(self) -> float:
        """With full overlap of communication and computation: the longer of both."""
        return max(self.compute_s + self.memory_s, self.link_s + self.latency_s)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        totals = {"serial_s": self.serial_s, "overlapped_s": self.overlapped_s}
        return {**asdict(self), **totals, "shares": self.shares}


def time_of(
    work: Mapping[tuple[float, float], int], traffic: Sequence[Traffic], rates: Rates
) -> Time:
    """Return the times of operations, {(FLOPs, bytes): how many}, and of collectives."""
    compute = memory = 0.0
    for (flops, nbytes), count in work.items():
        computing, moving = flops / rates.flops_per_s, nbytes / rates.memory_bytes_per_s
        if computing > moving:
            compute += computing * count
        else:
            memory += moving * count
    return Time(
        compute_s=compute,
        memory_s=memory,
        link_s=sum(one.wire_bytes for one in traffic) / rates.link_bytes_per_s,
        latency_s=sum(one.count for one in traffic) * rates.latency_s,
        rates=rates,
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(ShownAsText):
    """What one step takes on each rank. `print(plan)` is a table; so is it in a notebook.

    Shards are padded to one length, so all ranks hold and send the same number of bytes; `ranks`
    tells how many of them are padding on each rank. What a rule for matrices keeps of parameters,
    and sends, is that of the rank that is planned: `rank=`.
    """

    name: str  # of the model
    setups: tuple[Setup, ...]  # of each state: stage, axis, layout, optimizer
    device: str  # what is planned for: "cpu" (and gloo), "cuda" (and nccl), ...
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
        """Elements and padding of each of the W ranks, summed over the states."""
        held = torch.zeros(4, self.world, dtype=torch.int64, device="cpu")
        for setup in self.setups:
            every = range(len(setup.layout.groups))
            held[:2] += _held(setup, every, setup.params)
            held[2:] += _held(setup, setup.layout.trainable, setup.optimizer_state)
        return tuple(RankShare(rank, *of) for rank, of in enumerate(held.t().tolist()))

    def _padding(self) -> dict[str, int]:
        ranks = self.ranks
        return {
            "ranks": len(ranks),
            "most_padding": max(one.updated_padding for one in ranks),
            "ranks_that_update_nothing": sum(one.is_empty for one in ranks),
        }

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
            "ranks": self._padding(),
            "time": None if self.time is None else self.time.to_dict(),
        }

    @property
    def _where(self) -> str:
        replicas = self.setups[0].replicas
        shards = self.world // replicas
        ranks = f"{replicas:,} x {shards:,} ranks" if replicas > 1 else f"{self.world:,} ranks"
        backend = dist.get_default_backend_for_device(self.device)
        return f"{ranks}, {self.device} over {backend}"

    def table(self, *, bold: bool = False) -> str:
        """Return the tables, and below them what is to be known of them."""
        blocks = [_mark(f"{self.name}: stage {self.stage} on {self._where}", bold)]
        for heading, rows in self._tables():
            lines = columns(rows, numbers=True)
            blocks.append("\n".join([_mark(heading, bold), *(f"  {line}" for line in lines)]))
        return "\n\n".join([*blocks, "\n".join(self._notes())])

    def _tables(self) -> Iterator[tuple[str, list[Row]]]:
        def share(part: float) -> str:
            return f"{part:6.1%} {'#' * round(part * _BAR):<{_BAR}}"

        held = [(kind, in_bytes(n), f"{n:,}") for kind, n in self.bytes.items() if n]
        yield "a rank holds", held
        if self.peak:
            total = self.peak_bytes or 1
            peak = sorted(self.peak.items(), key=lambda item: -item[1])
            yield (
                "alive at the peak, on the device",
                [
                    (kind, in_bytes(n), f"{n:,}", share(n / total))
                    for kind, n in [*peak, ("in all", total)]
                ],
            )
        sent = [(f"{one.op} ({one.axis})", one.count, one.wire_bytes) for one in self.traffic]
        sent.append(("in all", sum(one.count for one in self.traffic), self.wire_bytes))
        rows = [(name, f"{count:,}", in_bytes(nbytes)) for name, count, nbytes in sent]
        yield "collectives of a step, and bytes that a rank sends", rows
        if (time := self.time) is not None:
            terms = [(x, in_seconds(s), share(time.shares[x])) for x, s in time.terms.items()]
            terms.append(("one after the other", in_seconds(time.serial_s), ""))
            terms.append(("communication beside compute", in_seconds(time.overlapped_s), ""))
            yield "estimated time of a step", terms

    def _notes(self) -> Iterator[str]:
        found = self._padding()
        outer = [as_inner(one) for one in self.setups if one.layout.options.outer is not None]
        owned = [one for one in (*self.setups, *outer) if owners_of(one) is not None]
        but = ", but for what it keeps, and sends, of the parameters that it owns" * bool(owned)
        yield f"Each of {found['ranks']:,} ranks holds as many bytes{but}."
        yield f"At most {found['most_padding']:,} of the elements that one updates are padding."
        yield from map(_of_owners, owned)
        empty = found["ranks_that_update_nothing"]
        if empty == found["ranks"]:
            yield "Nothing is updated: no parameter learns."
        elif empty:
            yield f"{empty:,} ranks update nothing: their shards are all padding."
        if self.part_bytes:
            held = in_bytes(self.mirror_bytes())
            yield f"A Mirror with copies=1 takes {held} of host memory for each rank."
        if self.peak:
            yield "The peak is of tensors without the batch, before what an allocator adds."
        else:
            yield "Without a model, activations, the peak and the time are not known."
        if self.time is not None:
            yield f"Time at {self.time.rates}."


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(ShownAsText):
    """Plans of one model side by side; `print(comparison)` is a table."""

    plans: tuple[Plan, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return all of it as plain values, for JSON."""
        return [plan.to_dict() for plan in self.plans]

    def table(self, *, bold: bool = False) -> str:
        """Return one table with a column for each plan."""
        if not self.plans:
            return _mark("no plan", bold)
        plans = self.plans
        kinds = dict.fromkeys(kind for plan in plans for kind, n in plan.bytes.items() if n)
        ops = dict.fromkeys(op for plan in plans for op in plan.collectives)
        rows: list[Row] = [("stage", *(str(plan.stage) for plan in plans))]
        for kind in kinds:
            rows.append((kind, *(in_bytes(plan.bytes.get(kind, 0)) for plan in plans)))
        peaks = (plan.peak_bytes for plan in plans)
        rows.append(("peak", *("not known" if n is None else in_bytes(n) for n in peaks)))
        for op in ops:
            rows.append((op, *(f"{plan.collectives.get(op, 0):,}" for plan in plans)))
        rows.append(("sent", *(in_bytes(plan.wire_bytes) for plan in plans)))
        if len(times := [plan.time for plan in plans if plan.time is not None]) == len(plans):
            rows.append(("time, serial", *(in_seconds(time.serial_s) for time in times)))
            rows.append(("time, overlapped", *(in_seconds(time.overlapped_s) for time in times)))
        title = _mark(f"{plans[0].name} on {plans[0]._where}", bold)
        return "\n".join([title, *columns(rows, numbers=True)])


def _held(setup: Setup, groups: Sequence[int], placement: Placement) -> Tensor:
    """Return [2, W]: elements of parameters, and of padding, in each rank's part of some groups."""
    parts = [setup.part(placement, rank).index for rank in range(setup.axis.size)]
    index = torch.tensor(parts, dtype=torch.int64, device="cpu")
    real = torch.zeros(setup.axis.size, dtype=torch.int64, device="cpu")
    total = 0
    for i in groups:
        length = setup.numel(i, placement)
        total += length
        group, leaves = setup.layout.groups[i], setup.layout.leaves
        starts = torch.tensor(group.offsets, dtype=torch.int64, device="cpu")[:, None]
        numels = torch.tensor([leaves[j].numel for j in group.leaves], device="cpu")[:, None]
        # A leaf has min(max(x - start, 0), numel) of its elements before position x of the flat.
        before = ((index * length) - starts).clamp(min=0).minimum(numels)
        after = ((index + 1) * length - starts).clamp(min=0).minimum(numels)
        real += (after - before).sum(0)
    return torch.stack([real, total - real])


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


def _mark(text: str, bold: bool) -> str:
    return f"\033[1m{text}\033[0m" if bold else text
