"""What an engine holds, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fzero.optim.precision import masters_of
from fzero.state import NAMESPACE, TrainState, Window
from fzero.transforms.backward_pass import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one rank, each {dtype: bytes}; nothing is counted twice.

    `parameters`: the module's own (stages 0 to 2), or this rank's shards (stage 3).
    `live_parameters`: full parameters that are gathered now (stage 3). `gradients`: those that
    wait, those that are reduced, and what encoding has lost. `masters`: fp32 copies.
    `optimizer`: its state. `slots`: what transforms keep.
    """

    parameters: dict[torch.dtype, int]
    live_parameters: dict[torch.dtype, int]
    gradients: dict[torch.dtype, int]
    masters: dict[torch.dtype, int]
    optimizer: dict[torch.dtype, int]
    slots: dict[torch.dtype, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(sum(kind.values()) for _, kind in self._kinds())

    def _kinds(self) -> list[tuple[str, dict[torch.dtype, int]]]:
        return [
            ("parameters", self.parameters),
            ("live parameters", self.live_parameters),
            ("gradients", self.gradients),
            ("masters", self.masters),
            ("optimizer", self.optimizer),
            *([("slots", self.slots)] if self.slots else []),
        ]

    def __str__(self) -> str:
        """One line for each kind."""
        lines = []
        for name, kind in self._kinds():
            text = ", ".join(f"{str(d).removeprefix('torch.')} {n:,}" for d, n in kind.items())
            lines.append(f"{name:<16}{text or 'nothing'}")
        return "\n".join([*lines, f"{'total':<16}{self.total_bytes:,} bytes"])


def report(state: TrainState, running: Pass) -> MemoryReport:
    """Add up what a state, and the gatherer of a pass, hold."""
    masters = masters_of(state)
    apart = set(map(id, masters))
    kept = [*optree.tree_leaves(state.optimizer, namespace=NAMESPACE), *_slots(state, "optimizer")]
    return MemoryReport(
        parameters=_bytes(state.params.flats),
        live_parameters=_bytes(x for full in running.gatherer.held.values() for x in full.flats),
        gradients=_bytes(
            [
                *state.gradients.flats,
                *_waiting(state.window),
                *_slots(state, "gradients"),
                *_slots(state, "window"),
            ]
        ),
        masters=_bytes(masters),
        optimizer=_bytes(x for x in kept if id(x) not in apart),
        slots=_bytes(_slots(state, "slots")),
    )


def _slots(state: TrainState, kind: str) -> list[Any]:
    """Return the tensors of slots that are counted under a kind."""
    held: Any = [slot for slot in state.slots.values() if slot.form.kind == kind]
    return optree.tree_leaves(held, namespace=NAMESPACE)


def _waiting(window: Window) -> list[Tensor]:
    return list(window.pending.flats)


def _bytes(values: Iterable[Any]) -> dict[torch.dtype, int]:
    found: Counter[torch.dtype] = Counter()
    for x in values:
        if isinstance(x, Tensor) and x.numel():
            found[x.dtype] += x.numel() * x.element_size()
    return dict(found)


def described(module: nn.Module, state: TrainState) -> str:
    """Return the line that an engine is shown as."""
    layout, axis = state.setup.layout, state.setup.axis
    return (
        f"Engine({type(module).__name__}, stage={state.stage}, {axis}, "
        f"{sum(x.numel for x in layout.leaves):,} parameters in {len(layout.groups)} groups, "
        f"{state.setup.optimizer!r}, {int(state.step)} updates, "
        f"{state.progress.backwards} backwards since)"
    )
