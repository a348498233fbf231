"""What a plan is: records of numbers, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fzero.plan import _text
from fzero.plan._ranks import RankShare, shares_of
from fzero.plan._time import Time
from fzero.state import Setup


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
    says what of it is padding on each.
    """

    name: str  # of the model
    setups: tuple[Setup, ...]  # of each state: stage, axis, layout, optimizer
    device: str  # what is planned for: "cpu" (and gloo) or "cuda" (and nccl)
    bytes: Mapping[str, int]  # what a rank holds of each kind of buffer, on the device or not
    peak: Mapping[str, int]  # by kind, on the device, when most is alive; empty: not known
    traffic: tuple[Traffic, ...]
    time: Time | None  # None: not known

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

    @property
    def ranks(self) -> tuple[RankShare, ...]:
        """What of its parts is padding, for each of the W ranks."""
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
            "ranks": _text.padding_of(self),
            "time": None if self.time is None else self.time.to_dict(),
        }

    def __repr__(self) -> str:
        return _text.of_plan(self)

    def _repr_html_(self) -> str:
        return _text.as_html(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """Plans of one model side by side; `print(comparison)` is a table."""

    plans: tuple[Plan, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return all of it as plain values, for JSON."""
        return [plan.to_dict() for plan in self.plans]

    def __repr__(self) -> str:
        return _text.of_comparison(self.plans)

    def _repr_html_(self) -> str:
        return _text.comparison_as_html(self.plans)
