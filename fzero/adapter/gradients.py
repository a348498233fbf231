"""The gradients of an engine, as the stand-ins in `p.grad` ask for them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.adapter.hooks import in_backward
from fzero.adapter.param_grad import (
    Earlier,
    HeldGradient,
    HoldsState,
    addresses_of,
    is_used_up,
    norms_of,
    notes_of,
    pieces_of,
    require_unweighted,
)
from fzero.machine.offload import change
from fzero.state import TrainState
from fzero.state.layout import as_bits, as_real
from fzero.state.progress import without_use
from fzero.transforms.recipe import times_factor
from fzero.transforms.weights import unaveraged


class Gradients:
    """What the stand-ins of an engine's parameters answer, and what was written to them.

    learning: the leaf of each parameter object that learns; a stand-in has its number among these.
    zeroed, removed: the numbers of those that somebody has set to zero, and to None. device, shows:
    see `Serves`.
    """

    def __init__(self, holder: HoldsState, learning: Sequence[int]) -> None:
        self._holder = holder
        self.device, self.stage = holder.state.device, holder.state.setup.stage
        self.shows = self.stage == 0
        self._addresses = addresses_of(holder.state.setup, learning)
        self.zeroed: set[int] = set()
        self.removed: set[int] = set()
        self._written: list[tuple[str, str, Sequence[Any]]] = []
        self._norms: dict[float, dict[int, Tensor]] = {}
        self._are_reduced, self.edits = False, 0

    def arrived(self) -> None:
        """A backward has brought others: what is known of them holds no more."""
        self._are_reduced, self.removed = False, set()
        self.changed()

    def changed(self) -> None:
        """The gradients are others now: what is known of them holds no more."""
        self._norms, self.zeroed = {}, set()
        self.edits += 1

    def forget(self) -> None:
        """There are none any more, so nothing was written to them."""
        self._written, self.removed = [], set()
        self.changed()

    @property
    def said(self) -> str:
        """What was written to `p.grad` since the update, for ranks to compare; usually nothing.

        Factors are compared to three digits: other hardware may sum a norm in another order. Of
        operands with more elements digests are compared.
        """
        if not self._written:
            return ""
        read: dict[int, str] = {}
        digest = 0
        for path, name, numbers in self._written:
            for x in numbers:
                if id(x) not in read:  # one factor is that of all parameters: it is read once
                    value: Any = x.item() if isinstance(x, Tensor) else x
                    read[id(x)] = f"{value:.3g}" if isinstance(value, float) else f"{value}"
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

    def range(self, held: HeldGradient) -> tuple[int, int]:
        """Return which elements of a gradient this rank has."""
        return self._addresses[held.number].range(self._holder.state)

    def piece(self, held: HeldGradient, name: str) -> Tensor:
        """Return this rank's elements of a gradient."""
        return self._addresses[held.number].piece(self._to_edit(name))

    def told(self, operands: Sequence[Any]) -> list[Any]:
        """Return what ranks compare of the operands of an operator on gradients."""
        given = [x.told if isinstance(x, HeldGradient) else (x,) for x in operands]
        alone = self._holder.state.setup.axis.size == 1
        return notes_of((x for some in given for x in some), alone=alone)

    def write(
        self, held: HeldGradient, name: str, told: Sequence[Any], run: Callable[[Tensor], Tensor]
    ) -> None:
        """Make this rank's elements of a gradient what `run` makes of them."""
        address, state = self._addresses[held.number], self._to_edit(name)
        made = as_real(run(address.piece(state))).reshape(-1)
        if address.leads:
            kept = times_factor(state, [unaveraged(state, made)])[0]
            change(address.flat(state), state.device, lambda home: home.copy_(kept))
        elif made.any():
            raise held.refusal(f"{name}, of a second parameter on one memory")
        self._written.append((held.path, name, told))
        self.edits += 1
        self._norms = {}
        self.zeroed.discard(held.number)

    def _to_edit(self, name: str) -> TrainState:
        self._holder.require_not_closed()
        state = self._holder.state
        if not self._are_reduced or state.window.is_open:
            state = self._reduced(f"p.grad.{name}")
        return state

    def zero(self, held: HeldGradient) -> None:
        """Set a gradient to zero; where all of them are, the engine drops them."""
        self._clear(held, "zero_", unused=0)
        self.zeroed.add(held.number)

    def remove(self, held: HeldGradient) -> None:
        """A `p.grad` was set to None, and others were not: the update does not use it."""
        if held.number not in self.removed:
            self._clear(held, "= None", unused=as_bits([self._addresses[held.number].here.leaf]))
            self.removed.add(held.number)

    def _clear(self, held: HeldGradient, how: str, *, unused: int) -> None:
        self._holder.require_not_closed()
        self._written.append((held.path, how, ()))
        self._norms = {}
        self.edits += 1
        address = self._addresses[held.number]
        if not address.leads:
            return

        def cleared(state: TrainState) -> TrainState:
            for piece in pieces_of(state, address):
                piece.zero_()
            return state.replace(progress=without_use(state.progress, unused))

        with torch.inference_mode(False), torch.no_grad():
            self._holder.put_each(cleared)

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
        return Earlier(self._holder, state, self._addresses, self.edits)

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
