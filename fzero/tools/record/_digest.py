"""Digests of a state: a few integers for each leaf, the same at every stage where the bits are.

    words     the XOR of the words of a leaf's elements: it finds any one flipped bit
    places    sum mod 2^64 of mix(word, index of the element): elements in other places, too

Both are made from the parts of ranks alone, whatever they are: XOR and sum of parts are those of
the whole. Padding is in no leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.elements import leaf_names, slots_of
from fzero.machine.offload import to_device
from fzero.machine.packing import leaf_ranges
from fzero.state import Placement, TrainState

Digest = Callable[[Tensor, int], Tensor]
"""(elements [n], the index of the first one in its leaf) -> [] int64."""


class DigestedLeaf(NamedTuple):
    """A leaf of a state that has a digest: of the parameters, or of a slot of the optimizer."""

    name: str
    placement: Placement  # where ranks have it


def digested_leaves(state: TrainState) -> tuple[DigestedLeaf, ...]:
    """Return what the digests of a state are of, in order: the same on every rank."""
    setup, names = state.setup, leaf_names(state.setup.layout)
    return tuple(
        DigestedLeaf(f"{what} {names[leaf]}", placement)
        for what, index, _, placement in _flats(state)
        for leaf in setup.layout.groups[index].leaves
    )


Place = tuple[int, int, int, int]
"""Of the part of a leaf that a rank has: its flat, where it is there, elements, the first one."""


def places_of(state: TrainState, rank: int) -> tuple[Place | None, ...]:
    """Return where a rank has each of `digested_leaves`; None: it has nothing of it."""
    setup, found = state.setup, list[Place | None]()
    for number, (_, index, _, placement) in enumerate(_flats(state)):
        held = {
            one.leaf: (number, one.at, one.stop - one.start, one.start)
            for one in leaf_ranges(setup.layout, index, setup.part(placement, rank))
        }
        found += [held.get(leaf) for leaf in setup.layout.groups[index].leaves]
    return tuple(found)


@torch.no_grad()
def digests_of(state: TrainState, where: Sequence[Place | None], digest: Digest) -> Tensor:
    """Return the digests [n] int64 of all that a rank holds, 0 of a leaf that it has nothing of."""
    flats = [to_device(flat, state.device) for _, _, flat, _ in _flats(state)]
    nothing = torch.zeros((), dtype=torch.int64, device=state.device)
    found = []
    for place in where:
        if place is None:
            found.append(nothing)
        else:
            number, at, numel, start = place
            found.append(digest(flats[number][at : at + numel], start))
    return torch.stack(found).cpu() if found else torch.zeros(0, dtype=torch.int64)


def words(x: Tensor, _: int = 0) -> Tensor:
    """The XOR of the words of elements [n], each widened to 64 bits: [] int64.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> torch.equal(words(x), words(x[:1]) ^ words(x[1:]))
        True
    """
    return torch.hash_tensor(x).view(torch.int64)


def places(x: Tensor, start: int) -> Tensor:
    """sum_i mix(bits of x_i, start + i) mod 2^64: [] int64. It changes if elements change places.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> torch.equal(places(x.flatten(), 0), places(x.T.flatten(), 0))
        False
    """
    bits = x.contiguous().view(_INTEGERS[x.dtype.itemsize]).to(torch.int64)
    index = torch.arange(start + 1, start + 1 + len(bits), device=bits.device)
    mixed = (bits ^ (index * _ODD[0])) * _ODD[1]
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * _ODD[2]
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)).sum()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers of 64 bits, of the finalizers of splitmix64."""


def of_leaves(leaves: Sequence[DigestedLeaf], rows: Tensor, shards: int, *, xor: bool) -> Tensor:
    """Return the digests [n] of whole leaves, from those of all ranks [W, n].

    shards: how many ranks have the parts of one replica. xor: of `words`, else of `places`.
    """
    found = []
    for leaf, column in zip(leaves, rows.unbind(1), strict=True):
        counts = {Placement.REPLICATED: 1, Placement.SHARDED: shards}.get(leaf.placement, len(rows))
        parts = column[:counts]
        found.append(_xor(parts) if xor else parts.sum())
    return torch.stack(found) if found else rows.new_zeros(0)


def _xor(x: Tensor) -> Tensor:
    total = x[0]
    for one in x[1:]:
        total = total ^ one
    return total


def _flats(state: TrainState) -> Iterator[tuple[str, int, Tensor, Placement]]:
    """Yield (what, group, what this rank has of it, where ranks have it)."""
    setup = state.setup
    for index, flat in enumerate(state.params.flats):
        yield "parameter", index, flat, setup.params
    for name, index, flat in slots_of(state):
        yield name, index, flat, setup.optimizer_state
