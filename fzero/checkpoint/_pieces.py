"""What a rank writes of a state: each entry by its form, and no feature by its name.

    <entry>/<leaf>          of flats, without padding: each rank its own part of every group
    <entry>/<n>/<leaf>      of flats that are summands: rank n's own, or replica n's
    <entry>, <entry>/<n>    a number; of summands rank n's own
    <entry>/<name>          a named tensor, flat
    replica/<r>/<entry>...  what replica r, which trains apart, has of its own

What replicas that train apart have in common, and what replica 0 has where nothing else stands for
it, is under the plain name: so a state without such replicas reads it. All is pure, and views only.

A leaf of n elements is saved as a 1-D tensor of n elements, whatever its shape: a shard cuts
leaves at any element, and in one dim every cut is a range. Every rank writes, and reads, only
its part of every group (`Setup.part`, over all ranks), also where it holds more: so the work is
shared at every stage, and replicas write nothing twice. Ranges are cut again at every multiple of
BLOCK_NUMEL: DCP reads saved ranges whole, and so nobody holds more than that of a leaf that is not
its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.errors import CheckpointError, LayoutError
from fzero.machine.named_shards import leaf_paths
from fzero.machine.packing import LeafRange, leaf_ranges, part_of
from fzero.state import Layout, Part, Placement, Setup, TrainState
from fzero.state.codec import decoded_row
from fzero.state.entry import Entry
from fzero.state.layout import Leaf, as_complex, as_real
from fzero.transforms.state_entries import (
    PARAMS,
    bases_of,
    entries_of,
    owning_ranks,
    shared_of,
    trains_apart,
)

_TEXT = re.compile(r"(torch\.\w+) \[([0-9, ]*)\]")

Texts = dict[str, dict[str, str]]
"""{entry: {leaf or name: its dtype; and its shape, unless it is that of the leaf}}."""


def pieces_of_rank(
    state: TrainState, rank: int, *, frozen: bool = True, shared: bool = False, live: bool = False
) -> list[TensorPiece]:
    """Return what one rank of the mesh writes of a state, as views.

    shared: all that it holds, also what other ranks have, too.
    live: also what does not live for the run.
    """
    setup = state.setup
    replica, own = divmod(rank, setup.axis.size)
    every = named_entries(state, rank, frozen=frozen, live=live)
    if trains_apart(state) and (shared or not replica):
        bases = [learning(setup, one, frozen) for one in ([] if replica else bases_of(state, own))]
        every += [(one, "") for one in (*bases, *shared_of(state, own))]
    named: dict[str, tuple[Entry, str]] = {}
    found: list[TensorPiece] = []
    for entry, prefix in every:
        for piece in pieces_of(setup, entry, own, prefix, shared=shared):
            if named.setdefault(piece.name, (entry, prefix))[0] is not entry:
                raise LayoutError(
                    f"save: two values are called {piece.name}.",
                    cause=f"the names {named[piece.name][0].name} and {entry.name}.",
                    fix="give one of the slots another name.",
                )
            found.append(piece)
    return found


def named_entries(
    state: TrainState, rank: int, *, frozen: bool = True, live: bool = False
) -> list[tuple[Entry, str]]:
    """Return (entry, what is before its name) of all that this rank's replica has of its own."""
    replica, own = divmod(rank, state.setup.axis.size)
    every = entries_of(state, own, live=live)
    apart = trains_apart(state)
    if apart or not frozen:
        every = [learning(state.setup, one, frozen and not apart) for one in every]
    stands = {one.name for one in bases_of(state, own)} if apart else set[str]()
    start = f"replica/{replica}/"
    return [(one, start if replica or one.name in stands else "") for one in every]


def learning(setup: Setup, entry: Entry, frozen: bool) -> Entry:
    """Return parameters without those that do not learn, unless `frozen`; others as they are."""
    if frozen or entry.name != PARAMS:
        return entry
    values = {i: x for i, x in entry.values.items() if i in setup.layout.trainable}
    return replace(entry, values=values)


def pieces_of(
    setup: Setup, entry: Entry, rank: int, prefix: str = "", *, shared: bool = False
) -> Iterator[TensorPiece]:
    """Yield what a rank writes of an entry; or if `shared`, all that it holds of it."""
    name, placement = prefix + entry.name, entry.placement
    if not entry.per_leaf:
        for key, x in entry.values.items():
            if placement is Placement.OWNER:  # owners in other replicas have equal values
                writes = key in entry.owned and (shared or rank < owning_ranks(setup))
            else:
                writes = shared or placement is Placement.PARTIAL or not rank
            if writes:
                own = str(rank) if placement is Placement.PARTIAL else ""
                yield from blocks("/".join(filter(None, (name, own, key))), x.reshape(-1))
        return
    for index, flat in entry.values.items():
        layout, full = setup.layout, name
        if placement is Placement.PARTIAL:
            number, held = held_part(setup, entry, index, flat, rank)
            full = f"{name}/{number}"
        else:
            held = setup.part(placement, rank)
        whole = shared or placement in (Placement.PARTIAL, Placement.BY_RANK)
        part = held if whole else setup.part(Placement.OVER_ALL, rank)
        if entry.form.codec is not None:
            flat = as_numbers(setup, entry, index, flat)
        if index in entry.codecs:
            layout = entry.codecs[index].layout(layout)
        yield from cut_shards(layout, full, index, part, part_of(flat, held, part))


def held_part(
    setup: Setup, entry: Entry, index: int, flat: Tensor, rank: int
) -> tuple[int | None, Part]:
    """Return the number of a summand, None for no summand; and which part of a flat a rank has."""
    if entry.placement is not Placement.PARTIAL:
        return None, setup.part(entry.placement, rank)
    if numel_of(setup, entry, index, flat) == setup.layout.full_numel(index):
        return rank, Part(1, 0)
    replica, shard = divmod(rank, setup.layout.ranks)
    return replica, Part(setup.layout.ranks, shard)


def numel_of(setup: Setup, entry: Entry, index: int, flat: Tensor) -> int:
    """Return how many elements a flat of a group has here."""
    if entry.placement is not Placement.PARTIAL:
        return setup.numel(index, entry.placement)
    sizes = (setup.layout.full_numel(index), setup.layout.groups[index].shard_numel)
    codec = entry.form.codec
    if codec is None or flat.is_floating_point():
        return flat.numel()
    return next(n for n in sizes if codec.wire_bytes(n) == flat.numel())


def as_numbers(setup: Setup, entry: Entry, index: int, flat: Tensor) -> Tensor:
    """Return a flat, decoded if it is encoded."""
    codec = entry.form.codec
    if codec is None or flat.is_floating_point():
        return flat
    return decoded_row(codec, flat, numel_of(setup, entry, index, flat))


def texts_of(setup: Setup, entry: Entry) -> dict[str, str]:
    """Return what a manifest says of the values of an entry, as far as this rank knows them."""
    layout, names = setup.layout, leaf_paths(setup.layout)
    if not entry.per_leaf:
        owned = entry.owned if entry.placement is Placement.OWNER else entry.values.keys()
        return {k: f"{x.dtype} {list(x.shape)}" for k, x in entry.values.items() if k in owned}
    found: dict[str, str] = {}
    for index, flat in entry.values.items():
        dtype = torch.float32 if entry.form.codec is not None else flat.dtype
        some = (i for i in layout.groups[index].leaves if layout.leaves[i].numel)
        found |= {names[i]: str(dtype) for i in some}
    return found


def form_in(name: str, text: str) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return the shape and dtype that a manifest says; None for no shape."""
    match = _TEXT.fullmatch(text)
    dtype = getattr(torch, match[1].removeprefix("torch."), None) if match else None
    if match is None and " " not in text:
        return None
    if match is None or not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"load: {name} is {text!r:.80} in the manifest.",
            cause="a manifest that another program wrote.",
            fix="use another copy of the checkpoint. Nothing was changed.",
        )
    return tuple(int(size) for size in match[2].split(",") if size.strip()), dtype


BLOCK_NUMEL = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Elements `start` to `start + len(values)` of the logical tensor `name`."""

    name: str
    start: int
    numel: int  # of the logical tensor
    values: Tensor  # a view of what the rank holds


def cut_shards(
    layout: Layout, prefix: str, index: int, part: Part, values: Tensor
) -> Iterator[TensorPiece]:
    """Cut a part of the flat of a group at the borders of leaves and blocks; no padding.

    prefix: before the names of leaves. values: of this part, a view of what the rank holds.
    """
    names = leaf_paths(layout)
    for held in leaf_ranges(layout, index, part):
        name, leaf = f"{prefix}/{names[held.leaf]}", layout.leaves[held.leaf]
        here, first, numel = held.of(values), held.start, leaf.numel
        if leaf.dtype.is_complex and here.dtype.itemsize >= 4:  # as its user has it
            here, first, numel = as_complex(here), first // 2, numel // 2
        yield from blocks(name, here, first, numel)


def blocks(
    name: str, values: Tensor, first: int = 0, numel: int | None = None
) -> Iterator[TensorPiece]:
    """Cut elements at multiples of a block: all of a tensor, or those from its `first` one on.

    numel: of the whole tensor.
    """
    end = first + values.numel()
    low, numel = first, end if numel is None else numel
    while low < end:
        stop = min(end, (low // BLOCK_NUMEL + 1) * BLOCK_NUMEL)
        own = values[low - first : stop - first]
        yield TensorPiece(name=name, start=low, numel=numel, values=own)
        low = stop


class Overlap(NamedTuple):
    """Which elements of a range have a value in a tensor of another shape, and where."""

    here: Tensor  # [n] bool, of the range
    there: Tensor  # [m] of each of those: the element of the other tensor

    def fill(self, target: Tensor, values: Tensor, first: int = 0) -> None:
        """Set them. values: of the other tensor, from its element `first` on."""
        found = values[self.there - first].to(target.device, target.dtype)
        target[self.here.to(target.device)] = found


def overlap(start: int, numel: int, own: tuple[int, ...], other: tuple[int, ...]) -> Overlap:
    """Return it, for `numel` elements of a tensor of shape `own` from `start` on.

    Example:
        >>> here, there = overlap(0, 4, (2, 2), (5, 3))
        >>> here.tolist(), there.tolist()
        ([True, True, True, True], [0, 1, 3, 4])
    """
    rest = torch.arange(start, start + numel, device="cpu")
    here, there, stride = torch.ones_like(rest, dtype=torch.bool), torch.zeros_like(rest), 1
    for size, known in zip(reversed(own), reversed(other), strict=True):
        at, rest = rest % size, rest // size
        here &= at < known
        there += at * stride
        stride *= known
    return Overlap(here, there[here])


def put_common(leaf: Leaf, found: Tensor, own: LeafRange, target: Tensor, codec: Any) -> None:
    """Set what of a leaf is in `found`, of another shape, too."""
    found, first, stop = as_real(found), own.start, own.stop
    if codec is not None:
        first, stop = (x // codec.block_bytes * codec.block for x in (first, stop))
    numbers = target if codec is None else codec.numbers(target).clone()
    common = overlap(first, min(stop, leaf.numel) - first, leaf.stored_shape, tuple(found.shape))
    common.fill(numbers[: common.here.numel()], found.reshape(-1))
    if codec is not None:
        codec.write(target, numbers)
