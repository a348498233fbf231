"""What an engine holds, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._assemble import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one rank, each {dtype: bytes}; nothing is counted twice.

    `parameters`: the module's own (stages 0 to 2), or this rank's shards (stage 3).
    `live_parameters`: full parameters that are gathered now (stage 3). `buckets`: gradients,
    pending, waiting and reduced. `masters`: fp32 copies. `optimizer`: its state.
    """

    parameters: dict[torch.dtype, int]
    live_parameters: dict[torch.dtype, int]
    buckets: dict[torch.dtype, int]
    masters: dict[torch.dtype, int]
    optimizer: dict[torch.dtype, int]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(sum(kind.values()) for _, kind in self._kinds())

    def _kinds(self) -> list[tuple[str, dict[torch.dtype, int]]]:
        return [
            ("parameters", self.parameters),
            ("live parameters", self.live_parameters),
            ("buckets", self.buckets),
            ("masters", self.masters),
            ("optimizer", self.optimizer),
        ]

    def __str__(self) -> str:
        """One line for each kind."""
        lines = []
        for name, kind in self._kinds():
            text = ", ".join(f"{str(d).removeprefix('torch.')} {n:,}" for d, n in kind.items())
            lines.append(f"{name:<16}{text or 'nothing'}")
        return "\n".join([*lines, f"{'total':<16}{self.total_bytes:,} bytes"])


def report(parts: Parts, optimizer: Any) -> MemoryReport:
    """Add up what `parts` and the optimizer hold."""
    masters = [parts.rows.of[index] for index in parts.rows.masters]
    held = parts.parameters.flats or parts.parameters.rows
    states = optimizer.state.values() if optimizer is not None else ()
    return MemoryReport(
        parameters=_bytes(held),
        live_parameters=_bytes(parts.source.flats if parts.source is not None else ()),
        buckets=_bytes(x for bucket in parts.buckets for x in bucket.tensors),
        masters=_bytes(masters),
        optimizer=_bytes(x for state in states for x in state.values()),
    )


def _bytes(values: Iterable[Any]) -> dict[torch.dtype, int]:
    found: Counter[torch.dtype] = Counter()
    for x in values:
        if isinstance(x, Tensor):
            found[x.dtype] += x.numel() * x.element_size()
    return dict(found)
