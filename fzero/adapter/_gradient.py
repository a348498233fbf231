"""The gradients of an engine, as the stand-ins in `p.grad` ask for them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._addresses import addresses_of, norms_of, pieces_of, require_unweighted
from fzero.adapter._earlier import Earlier, is_used_up
from fzero.adapter._held import HeldGradient
from fzero.adapter._life import HoldsState
from fzero.adapter._torch_hooks import in_backward
from fzero.machine.offload import change
from fzero.state import TrainState
from fzero.transforms.builtins import times_factor
from fzero.transforms.weights import unaveraged


class Gradients:
    """What the stand-ins of an engine's parameters answer, and what was written to them.

    learning: the leaf of each parameter object that learns; a stand-in has its number among these.
    zeroed: the numbers of those that somebody has set to zero. device, shows: see `Serves`.
    """

    def __init__(self, holder: HoldsState, learning: Sequence[int]) -> None:
        self._holder = holder
        self.device, self.stage = holder.state.device, holder.state.setup.stage
        self.shows = self.stage == 0
        self._addresses = addresses_of(holder.state.setup, learning)
        self.zeroed: set[int] = set()
        self._written: list[tuple[str, str, Sequence[Any]]] = []
        self._norms: dict[float, dict[int, Tensor]] = {}
        self._are_reduced = False

    def arrived(self) -> None:
        """A backward has brought others: what is known of them holds no more."""
        self._are_reduced = False
        self.changed()

    def changed(self) -> None:
        """The gradients are others now: what is known of them holds no more."""
        self._norms = {}
        self.zeroed = set()

    def forget(self) -> None:
        """There are none any more, so nothing was written to them."""
        self._written = []
        self.changed()

    @property
    def said(self) -> str:
        """What was written to `p.grad` since the update, for ranks to compare; usually nothing.

        Factors are compared to three digits: other hardware may sum a norm in another order.
        """
        if not self._written:
            return ""
        read: dict[int, str] = {}
        digest = 0
        for path, name, numbers in self._written:
            for x in numbers:
                if id(x) not in read:  # one factor is that of all parameters: it is read once
                    read[id(x)] = f"{x.item():.3g}" if isinstance(x, Tensor) else f"{x}"
            text = f"{path} {name} {[read[id(x)] for x in numbers]}"
            digest = zlib.crc32(text.encode(), digest)
        path, name, numbers = self._written[-1]
        last = f"{name}({', '.join(read[id(x)] for x in numbers)}) of {path}"
        return f", p.grad written {len(self._written)} times, last by {last} ({digest:08x})"

    # What stand-ins ask for.

    def notice(self) -> None:
        """Drop the gradients that the user has dropped."""
        if self._holder.user_dropped and not in_backward():
            self._holder.drop_if_user_did()

    def require_no_window(self, name: str) -> None:
        """Raise `PhaseError` inside a window, where gradients are not reduced."""
        self._holder.require_no_window(name)

    def norm(self, held: HeldGradient, order: float) -> Tensor:
        """Return the norm of a gradient: that of all of them is computed at the first request."""
        address = self._addresses[held.number]
        if order not in self._norms:
            with torch.inference_mode(False), torch.no_grad():
                self._norms[order] = norms_of(self._reduced(f"p.grad.norm({order:g})"), order)
        return address.norm(self._norms[order])

    def write(self, held: HeldGradient, name: str, numbers: Sequence[Any]) -> None:
        """Change this rank's part of a gradient by numbers, which must be those of all ranks."""
        address = self._addresses[held.number]
        with torch.inference_mode(False), torch.no_grad():
            self._holder.require_not_closed()
            state = self._holder.state
            if not self._are_reduced or state.window.is_open:
                state = self._reduced(f"p.grad.{name}")
            self._written.append((held.path, name, tuple(numbers)))
            self._norms = {}
            self.zeroed.discard(held.number)
            if not address.leads or address.here.start == address.here.stop:
                return
            used = numbers
            if name.startswith("clamp"):
                used = [as_held(state, address.index, x) for x in numbers]
            piece = address.here.of(state.gradients.flats[address.number])
            write = getattr(Tensor, name)
            change(piece, state.device, lambda x: write(x, *used))

    def zero(self, held: HeldGradient) -> None:
        """Set a gradient to zero; where all of them are, the engine drops them."""
        self._holder.require_not_closed()
        self._written.append((held.path, "zero_", ()))
        self._norms = {}
        self.zeroed.add(held.number)
        address = self._addresses[held.number]
        if not address.leads:
            return

        def zeroed(state: TrainState) -> TrainState:
            for piece in pieces_of(state, address):
                piece.zero_()
            return state

        with torch.inference_mode(False), torch.no_grad():
            self._holder.put_each(zeroed)

    def values(self, held: HeldGradient) -> Tensor:
        """Return a gradient as an update would use it, in the dtype of the parameter."""
        require_unweighted(self._holder.state)
        with torch.inference_mode(False), torch.no_grad():
            state = self._holder.state if self.at_hand else self._reduced("reading p.grad")
            return self._addresses[held.number].values(state).to(held.dtype)

    @property
    def at_hand(self) -> bool:
        """Whether this rank has all of the gradients, and nothing waits to be reduced."""
        if self._holder.closed or not self.shows:
            return False
        state = self._holder.state
        waits = state.window.is_open or state.window.pending.held
        return state.gradients.held and not waits

    def left(self) -> Earlier | None:
        """Return what has these gradients when they are dropped; None if nothing has.

        It holds the buffers that the state lets go, for as long as somebody holds a stand-in.
        """
        state = self._holder.state
        waits = state.window.is_open or state.window.pending.held
        if waits or not state.gradients.held or is_used_up(state):
            return None
        return Earlier(self._holder, state, self._addresses)

    def _reduced(self, name: str) -> TrainState:
        self._holder.require_not_closed()
        state = self._holder.with_gradients(name)
        self._are_reduced = True
        return state


def as_held(state: TrainState, index: int, bound: Any) -> Any:
    """A bound of what an update uses, as one of what the state holds of a group."""
    if bound is None:
        return None
    dtype = state.setup.accumulate_dtype(index)
    bound = torch.as_tensor(bound, dtype=dtype, device=state.device)
    return times_factor(state, [unaveraged(state, bound)])[0]
