"""Digests of a state: a few integers for each leaf, the same at every stage where the bits are.

    words     sum mod 2^64 of a leaf's words of 64 bits: it finds any one flipped bit
    places    sum mod 2^64 of mix(element, its index): elements in other places, too

Both are made from the parts of ranks alone, however they are cut: sums of parts are those of the
whole. Padding is in no leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.machine.named_shards import leaf_paths
from fzero.machine.offload import to_device
from fzero.machine.packing import leaf_ranges
from fzero.optim.entries import slots_of
from fzero.state import NAMESPACE, Buffers, Layout, Placement, TrainState

Digest = Callable[[Tensor, int], Tensor]
"""(elements [n], the index of the first one in its leaf) -> [] int64."""


class DigestedLeaf(NamedTuple):
    """A leaf of a state that has a digest: of the parameters, of the optimizer, or of a slot."""

    name: str
    placement: Placement  # where ranks have it


def digested_leaves(state: TrainState) -> tuple[DigestedLeaf, ...]:
    """Return what the digests of a state are of, in order: the same on every rank."""
    setup, names = state.setup, leaf_paths(state.setup.layout)
    leaves = [
        DigestedLeaf(f"{what} {names[leaf]}", placement)
        for what, index, _, placement, _ in _flats(state)
        for leaf in setup.layout.groups[index].leaves
    ]
    return (*leaves, *(DigestedLeaf(name, placement) for name, _, placement in _tensors(state)))


Place = tuple[int, int, int, int]
"""Of the part of a leaf that a rank has: its flat, where it is there, elements, the first one."""


class Places(NamedTuple):
    """Where a rank has each of `digested_leaves`; it stays so from update to update."""

    slots: tuple[int, ...]  # which leaves of what a state keeps are flats
    of_leaves: tuple[Place | None, ...]  # None: it has nothing of that leaf


def places_of(state: TrainState, rank: int) -> Places:
    """Return where a rank of the mesh has what has a digest."""
    setup, found = state.setup, list[Place | None]()
    rank %= setup.axis.size  # in its replica, if replicas train apart
    for number, (_, index, _, placement, layout) in enumerate(_flats(state)):
        held = {
            one.leaf: (number, one.at, one.stop - one.start, one.start)
            for one in leaf_ranges(layout, index, setup.part(placement, rank))
        }
        found += [held.get(leaf) for leaf in setup.layout.groups[index].leaves]
    numbers = {id(x): i for i, x in enumerate(_leaves(state))}
    kept = [flat for _, _, flat, *_ in _flats(state)][len(state.params.flats) :]
    return Places(tuple(numbers[id(flat)] for flat in kept), tuple(found))


@torch.no_grad()
def digests_of(state: TrainState, where: Places, digest: Digest) -> Tensor:
    """Return the digests [n] int64 of all that a rank holds, 0 of a leaf that it has nothing of."""
    leaves = _leaves(state)
    held = [*state.params.flats, *(leaves[i] for i in where.slots)]
    flats = [to_device(flat, state.device) for flat in held]
    nothing = torch.zeros((), dtype=torch.int64, device=state.device)
    found = []
    for place in where.of_leaves:
        if place is None:
            found.append(nothing)
        else:
            number, at, numel, start = place
            found.append(digest(flats[number][at : at + numel], start))
    for _, x, _ in _tensors(state):
        flat = to_device(x, state.device).reshape(-1)
        found.append(digest(_integers(flat), 0) if flat.numel() else nothing)
    return torch.stack(found).cpu() if found else torch.zeros(0, dtype=torch.int64)


def words(x: Tensor, start: int) -> Tensor:
    """The sum mod 2^64 of a leaf's words of 64 bits, from element `start` on: [] int64.

    A word that is cut counts by its elements, each in its place. A sum is as blind to words that
    changed places as an XOR, and several times faster than torch.hash_tensor.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> torch.equal(words(x, 0), words(x[:1], 0) + words(x[1:], 1))
        True
    """
    per = 8 // x.dtype.itemsize
    head = min(-start % per, len(x))
    stop = head + (len(x) - head) // per * per
    if (x.storage_offset() + head) % per:  # no word begins there in memory
        stop = head
    body = x[head:stop]
    total = body.view(torch.int64).sum() if stop > head else x.new_zeros((), dtype=torch.int64)
    for first, last in ((0, head), (stop, len(x))):
        if first < last:
            total = total + _of_elements(x[first:last], start + first, per)
    return total


def _of_elements(x: Tensor, start: int, per: int) -> Tensor:
    bits = x.view(_INTEGERS[x.dtype.itemsize]).to(torch.int64)
    if per == 1:
        return bits.sum()
    bits = bits & (2 ** (8 * x.dtype.itemsize) - 1)
    place = torch.arange(start, start + len(x), device=x.device) % per
    return (bits << (place * (8 * x.dtype.itemsize))).sum()


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


def of_leaves(leaves: Sequence[DigestedLeaf], rows: Tensor, shards: int) -> Tensor:
    """Return the digests [n] of whole leaves, from those of all ranks [W, n].

    shards: how many ranks have the parts of one replica; the first one counts.
    """
    found = []
    for leaf, column in zip(leaves, rows.unbind(1), strict=True):
        if leaf.placement is Placement.OWNER:  # virtual ranks are shown what one of them has
            found.append(column[column.ne(0).to(torch.int8).argmax()])
            continue
        counts = {Placement.REPLICATED: 1, Placement.SHARDED: shards}.get(leaf.placement, len(rows))
        found.append(column[:counts].sum())
    return torch.stack(found) if found else rows.new_zeros(0)


def _leaves(state: TrainState) -> list[Any]:
    """Return what a state keeps as tensors, but for records, which have more or fewer at times."""
    slots = {name: x.value for name, x in state.slots.items() if x.form.leaves != "record"}
    tree: Any = (state.optimizer, slots)
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def _flats(state: TrainState) -> Iterator[tuple[str, int, Tensor, Placement, Layout]]:
    """Yield (what, group, what this rank has of it, where ranks have it, where leaves lie)."""
    setup, layout = state.setup, state.setup.layout
    for index, flat in enumerate(state.params.flats):
        yield "parameter", index, flat, setup.params, layout
    for name, index, flat, codec in slots_of(state):
        own = layout if codec is None else codec.layout(layout)
        yield name, index, flat, setup.optimizer_state, own
    every = range(len(setup.layout.groups))
    for name, slot in state.slots.items():
        if isinstance(slot.value, Buffers):
            groups = every if slot.form.leaves == "all" else setup.layout.trainable
            for index, flat in zip(groups, slot.value.flats, strict=True):
                if flat.numel():
                    yield name, index, flat, slot.value.placement, layout


def _tensors(state: TrainState) -> Iterator[tuple[str, Tensor, Placement]]:
    """Yield (name, tensor, where ranks have it) of the slots that are parallel to no leaf."""
    for name, slot in state.slots.items():
        placement = slot.form.placed(state.setup.optimizer_state)
        if slot.form.elsewhere == "own":
            placement = Placement.PARTIAL  # of each rank its own
        if isinstance(slot.value, dict):
            for key in sorted(slot.value):
                yield f"{name} {key}", slot.value[key], placement
        elif isinstance(slot.value, Tensor):
            yield name, slot.value, placement


def _integers(x: Tensor) -> Tensor:
    return x.to(torch.uint8) if x.dtype is torch.bool else x
