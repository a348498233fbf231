"""Gradients of an engine that were dropped, for the stand-ins that somebody has kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._addresses import GradientAddress, norms_of, notes_of, require_unweighted
from fzero.adapter._held import HeldGradient
from fzero.adapter._life import HoldsState
from fzero.errors import PhaseError
from fzero.state import Buffers, TrainState


class Earlier:
    """Gradients that were dropped, as they were then: their values and norms, to read."""

    def __init__(
        self,
        holder: HoldsState,
        state: TrainState,
        addresses: Sequence[GradientAddress],
        edits: int,
    ) -> None:
        self._holder, self.edits = weakref.ref(holder), edits
        self.device, self.stage = state.device, state.stage
        self.shows = self.stage == 0
        nothing = Buffers(flats=(torch.empty(0, device=state.device),))
        self._state, self._addresses = state.replace(params=nothing, optimizer=()), addresses
        self._norms: dict[float, dict[int, Tensor]] = {}

    @property
    def at_hand(self) -> bool:
        """Whether this rank has all of them."""
        holder = self._holder()
        return self.shows and holder is not None and not holder.closed

    def norm(self, held: HeldGradient, order: float) -> Tensor:
        """Return the norm of one of them. A collective for the first one."""
        if order not in self._norms:
            with torch.inference_mode(False), torch.no_grad():
                self._open().call(f"p.grad.norm({order:g}) of an earlier gradient")
                self._norms[order] = norms_of(self._state, order)
        return self._addresses[held.number].norm(self._norms[order])

    def values(self, held: HeldGradient) -> Tensor:
        """Return the elements of one of them."""
        self._open()
        require_unweighted(self._state)
        with torch.inference_mode(False), torch.no_grad():
            return self._addresses[held.number].values(self._state).to(held.dtype)

    def range(self, held: HeldGradient) -> tuple[int, int]:
        """Return which elements of one of them this rank has."""
        return self._addresses[held.number].range(self._state)

    def piece(self, held: HeldGradient, name: str) -> Tensor:
        """Return this rank's elements of one of them."""
        self._open()
        return self._addresses[held.number].piece(self._state)

    def told(self, operands: Sequence[Any]) -> list[Any]:
        """Return what ranks compare of operands."""
        return notes_of(operands, alone=self._state.setup.axis.size == 1)

    def write(
        self, held: HeldGradient, name: str, told: Sequence[Any], run: Callable[[Tensor], Tensor]
    ) -> None:
        """Raise `PhaseError`: the engine has them no more."""
        raise PhaseError(
            f"p.grad.{name} of an earlier gradient of {held.path}, which was dropped since.",
            cause="a p.grad that was kept over zero_grad() or step(); p.grad is another one now.",
            fix="write to p.grad as it is now, or to a copy: at stage 0 g.clone(), at each stage "
            "engine.full_gradient(path) while the engine has it.",
        )

    def zero(self, held: HeldGradient) -> None:
        """Raise `PhaseError`, as any write."""
        self.write(held, "zero_", (), torch.zero_)

    def require_no_window(self, name: str) -> None:
        """They were reduced."""

    def _open(self) -> HoldsState:
        holder = self._holder()
        if holder is None:
            raise PhaseError(
                "an earlier gradient of an engine that is gone.",
                cause="a p.grad that was kept, and nothing holds the engine any more.",
                fix="keep the engine for as long as its gradients are used, or copies of them.",
            )
        holder.require_not_closed()
        return holder


def is_used_up(state: TrainState) -> bool:
    """Whether an update has scaled the gradients in place, and taken them from the state."""
    layout = state.setup.layout
    pairs = zip(layout.trainable, state.gradients.flats, strict=True)
    return any(layout.groups[index].shard_numel and not flat.numel() for index, flat in pairs)
