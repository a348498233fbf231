"""Where the gradient of each parameter is in a state: its elements, and the norms of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.collectives import gather_many
from fzero.errors import PhaseError
from fzero.machine.packing import LeafRange, hashed, leaf_ranges
from fzero.machine.placeholder import Memoryless
from fzero.state import Setup, TrainState
from fzero.state.layout import as_complex, stored_dtype
from fzero.transforms.loss_scale import without_scale
from fzero.transforms.weights import averaged


class GradientAddress(NamedTuple):
    """Where the gradient of one parameter object is in a state."""

    leads: bool  # of several objects on one memory, which are one leaf, the first has its gradient
    number: int  # of its group among those that learn
    index: int  # of its group
    here: LeafRange  # what this rank's part has of it

    def norm(self, norms: Mapping[int, Tensor]) -> Tensor:
        """Its own of the norms by leaf."""
        norm = norms[self.here.leaf].clone()
        return norm if self.leads else torch.zeros_like(norm)

    def range(self, state: TrainState) -> tuple[int, int]:
        """Which of its elements this rank has, of a state with gradients."""
        by = 2 if state.setup.layout.leaves[self.here.leaf].dtype.is_complex else 1
        return self.here.start // by, self.here.stop // by

    def flat(self, state: TrainState) -> Tensor:
        """What this rank holds of it: a view."""
        return self.here.of(state.gradients.flats[self.number])

    def piece(self, state: TrainState) -> Tensor:
        """This rank's elements of it as an update would use them: [n], a copy."""
        found = averaged(state, without_scale(state, self.flat(state)))
        found = found if self.leads else torch.zeros_like(found)
        is_complex = state.setup.layout.leaves[self.here.leaf].dtype.is_complex
        return as_complex(found) if is_complex else found

    def values(self, state: TrainState) -> Tensor:
        """All of its elements, of a state that has them on each rank."""
        return self.piece(state).view(state.setup.layout.leaves[self.here.leaf].shape)


def addresses_of(setup: Setup, learning: Sequence[int]) -> list[GradientAddress]:
    """Return where the gradients of these leaves are, one for each parameter object."""
    layout, part = setup.layout, setup.part(setup.gradients, setup.axis.rank)
    first = {leaf: i for i, leaf in reversed([*enumerate(learning)])}
    where: dict[int, tuple[int, int, LeafRange]] = {}
    for number, index in enumerate(layout.trainable):
        here = {one.leaf: one for one in leaf_ranges(layout, index, part)}
        for position, leaf in enumerate(layout.groups[index].leaves):
            nothing = LeafRange(position, leaf, 0, 0, 0)
            where[leaf] = number, index, here.get(leaf, nothing)
    return [GradientAddress(first[leaf] == i, *where[leaf]) for i, leaf in enumerate(learning)]


def pieces_of(state: TrainState, address: GradientAddress) -> Iterator[Tensor]:
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


def notes_of(operands: Iterable[Any], *, alone: bool) -> list[Any]:
    """Return what ranks compare of the operands of an operator on gradients: numbers, and digests.

    alone: there are no other ranks.
    """
    found: list[Any] = []
    for x in () if alone else operands:
        large = isinstance(x, Tensor) and x.numel() != 1
        if not isinstance(x, Memoryless):
            found.append(hashed(x) if large else x)
    return found


def require_unweighted(state: TrainState) -> None:
    """Raise `PhaseError` where all ranks must be asked for what a gradient is divided by."""
    setup = state.setup
    if setup.reduction.weighted and setup.axis.size > 1:
        raise PhaseError(
            "p.grad was read; the gradients are sums of w g, and their total weight is known "
            "when all ranks are asked.",
            cause="engine.backward(loss, weight=), and code that looks at p.grad.",
            fix="engine.full_gradient(path), on every rank, divides by the total.",
        )
