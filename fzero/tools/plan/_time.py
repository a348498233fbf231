"""Estimate the time of a step from its operations, its collectives and stated rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fzero.errors.check import is_positive, require


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
            "compute": self.compute_s,
            "memory": self.memory_s,
            "link": self.link_s,
            "latency": self.latency_s,
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
    work: Mapping[tuple[float, float], int], calls: Iterable[tuple[int, int]], rates: Rates
) -> Time:
    """Return the times of operations, {(FLOPs, bytes): how many}, and of (count, bytes) calls."""
    compute = memory = 0.0
    for (flops, nbytes), count in work.items():
        computing, moving = flops / rates.flops_per_s, nbytes / rates.memory_bytes_per_s
        if computing > moving:
            compute += computing * count
        else:
            memory += moving * count
    some = list(calls)
    return Time(
        compute_s=compute,
        memory_s=memory,
        link_s=sum(nbytes for _, nbytes in some) / rates.link_bytes_per_s,
        latency_s=sum(count for count, _ in some) * rates.latency_s,
        rates=rates,
    )
