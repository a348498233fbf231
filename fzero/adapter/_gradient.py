"""The gradients of an engine, as the stand-ins in `p.grad` ask for them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.adapter._held import HeldGradient
from fzero.collectives import gather_many
from fzero.errors import PhaseError
from fzero.machine.offload import change
from fzero.machine.packing import LeafRange, leaf_ranges
from fzero.state import Setup, TrainState, progress
from fzero.state.layout import as_bits, as_complex, stored_dtype
from fzero.transforms.scaled import times_scale, without_scale
from fzero.transforms.weights import averaged, unaveraged


class HoldsState(Protocol):
    """Whoever has the state that the gradients are in."""

    @property
    def state(self) -> TrainState:
        """The state now."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it is used no more."""
        ...

    def require_not_closed(self) -> None:
        """Raise `PhaseError` if it is used no more."""
        ...

    def with_gradients(self, name: str) -> TrainState:
        """Return the state with all gradients reduced, for a call of this name. A collective."""
        ...

    def put_each(self, change: Callable[[TrainState], TrainState]) -> None:
        """Change the state, and that from before a window."""
        ...


class GradientAddress(NamedTuple):
    """Where the gradient of one parameter object is in a state."""

    leads: bool  # of several objects on one memory, which are one leaf, the first has its gradient
    number: int  # of its group among those that learn
    index: int  # of its group
    here: LeafRange  # what this rank's part has of it


class Gradients:
    """What the stand-ins of an engine's parameters answer, and what was written to them.

    learning: the leaf of each parameter object that learns; a stand-in has its number among these.
    zeroed: the numbers of those that somebody has set to zero. device, shows: see `Serves`.
    """

    def __init__(self, holder: HoldsState, learning: Sequence[int]) -> None:
        self._holder = holder
        self.device, self.shows = holder.state.device, holder.state.setup.stage == 0
        self._addresses = _addresses(holder.state.setup, learning)
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

    def norm(self, held: HeldGradient, order: float) -> Tensor:
        """Return the norm of a gradient: that of all of them is computed at the first request."""
        address = self._addresses[held.number]
        if order not in self._norms:
            with torch.inference_mode(False), torch.no_grad():
                self._norms[order] = norms_of(self._reduced(f"p.grad.norm({order:g})"), order)
        norm = self._norms[order][address.here.leaf].clone()
        return norm if address.leads else torch.zeros_like(norm)

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
            for piece in _pieces(state, address):
                piece.zero_()
            used = progress.saw_zero(state.progress, as_bits([address.here.leaf]))
            return state.replace(progress=used)

        with torch.inference_mode(False), torch.no_grad():
            self._holder.put_each(zeroed)

    def values(self, held: HeldGradient) -> Tensor:
        """Return a gradient as an update would use it, in the dtype of the parameter."""
        address = self._addresses[held.number]
        setup = self._holder.state.setup
        if setup.reduction.weighted and setup.axis.size > 1:
            raise PhaseError(
                "p.grad was read; the gradients are sums of w g, and their total weight is known "
                "when all ranks are asked.",
                cause="engine.backward(loss, weight=), and code that looks at p.grad.",
                fix="engine.full_gradient(path), on every rank, divides by the total.",
            )
        with torch.inference_mode(False), torch.no_grad():
            state = self._holder.state if self.at_hand else self._reduced("reading p.grad")
            piece = address.here.of(state.gradients.flats[address.number])
            leaf = state.setup.layout.leaves[address.here.leaf]
            whole = leaf.of(averaged(state, without_scale(state, piece)))
            return (whole if address.leads else torch.zeros_like(whole)).to(held.dtype)

    @property
    def at_hand(self) -> bool:
        """Whether this rank has all of the gradients, and nothing waits to be reduced."""
        if self._holder.closed or not self.shows:
            return False
        state = self._holder.state
        waits = state.window.is_open or state.window.pending.held
        return state.gradients.held and not waits

    def _reduced(self, name: str) -> TrainState:
        self._holder.require_not_closed()
        state = self._holder.with_gradients(name)
        self._are_reduced = True
        return state


def _addresses(setup: Setup, learning: Sequence[int]) -> list[GradientAddress]:
    layout, part = setup.layout, setup.part(setup.gradients, setup.axis.rank)
    first = {leaf: i for i, leaf in reversed([*enumerate(learning)])}
    where: dict[int, tuple[int, int, LeafRange]] = {}
    for number, index in enumerate(layout.trainable):
        here = {one.leaf: one for one in leaf_ranges(layout, index, part)}
        for position, leaf in enumerate(layout.groups[index].leaves):
            nothing = LeafRange(position, leaf, 0, 0, 0)
            where[leaf] = number, index, here.get(leaf, nothing)
    return [GradientAddress(first[leaf] == i, *where[leaf]) for i, leaf in enumerate(learning)]


def _pieces(state: TrainState, address: GradientAddress) -> Iterator[Tensor]:
    """What this rank holds of a gradient: reduced, and not yet."""
    if state.gradients.held:
        yield address.here.of(state.gradients.flats[address.number])
    pending, layout = state.window.pending, state.setup.layout
    if pending.held:
        begin = layout.groups[address.index].offsets[address.here.position]
        yield pending.flats[address.number][begin : begin + layout.leaves[address.here.leaf].numel]


def norms_of(state: TrainState, order: float) -> dict[int, Tensor]:
    """Return the norm of the gradient of every leaf that learns, on every rank. One collective."""
    setup, layout = state.setup, state.setup.layout
    found: dict[int, Tensor] = {}
    for number, index in enumerate(layout.trainable):
        flat = without_scale(state, state.gradients.flats[number])
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        for one in leaf_ranges(layout, index, setup.part(setup.gradients, setup.axis.rank)):
            own = one.of(wide)
            own = as_complex(own) if layout.leaves[one.leaf].dtype.is_complex else own
            found[one.leaf] = torch.linalg.vector_norm(own, order)
    nothing = torch.tensor(0.0 if order >= 0 else float("inf"), device=state.device)
    learning = [leaf for index in layout.trainable for leaf in layout.groups[index].leaves]
    row = torch.stack([found.get(leaf, nothing).double() for leaf in learning])
    rows = gather_many([row], setup.over(setup.gradients))[0].view(-1, len(learning))
    total = row
    if len(rows) > 1:
        total = rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, dim=0)
    if order != 0:
        total = averaged(state, total)
    stored = [stored_dtype(layout.leaves[i].dtype) for i in learning]
    dtypes = [torch.promote_types(dtype, torch.float32) for dtype in stored]
    return {leaf: norm.to(dtype) for leaf, norm, dtype in zip(learning, total, dtypes, strict=True)}


def as_held(state: TrainState, index: int, bound: Any) -> Any:
    """A bound of what an update uses, as one of what the state holds of a group."""
    if bound is None:
        return None
    dtype = state.setup.accumulate_dtype(index)
    bound = torch.as_tensor(bound, dtype=dtype, device=state.device)
    return times_scale(state, [unaveraged(state, bound)])[0]
