"""Which elements of which logical tensor a rank holds: pure, and views only.

A leaf of n elements is saved as a 1-D tensor of n elements, whatever its shape: a shard cuts
leaves at any element, and in one dim every cut is a range. Every rank writes, and reads, only
its part of every group (`Setup.part`, over all ranks), also where it holds more: so the work is
shared at every stage, and replicas write nothing twice. Ranges
are cut again at every multiple of BLOCK_NUMEL: DCP reads saved ranges whole, and so nobody holds
more than that of a leaf that is not its own.

    state --shards_of--> a part of each group --pieces_of--> ranges of leaves
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from fzero.checkpoint._slots import slots_of
from fzero.machine.packing import leaf_ranges, part_of
from fzero.machine.partition import named_leaves
from fzero.state import Layout, Part, Placement, TrainState
from fzero.state.layout import as_complex

BLOCK_NUMEL = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Elements `start` to `start + len(values)` of the logical tensor `name`."""

    name: str
    start: int
    numel: int  # of the logical tensor
    values: Tensor  # a view of what the rank holds


class OwnShard(NamedTuple):
    """A part of one group of parameters, of one optimizer slot, or of a residual."""

    prefix: str  # params, optimizer/<slot>, or residual/<rank>
    group: int
    part: Part  # of the group's flat
    values: Tensor  # of this part, a view of what the rank holds


def leaf_names(layout: Layout) -> list[str]:
    """Return the path of every leaf; one that two leaves share is numbered from the second on.

    Example:
        >>> import torch
        >>> from fzero.machine.partition import plan_layout
        >>> leaf_names(plan_layout({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ranks=1))
        ['a.b', 'a.b#2']
    """
    names: dict[str, None] = {}
    for leaf in layout.leaves:
        name, number = leaf.path, 1
        while name in names:
            number += 1
            name = f"{leaf.path}#{number}"
        names[name] = None
    return list(names)


def paths_of(layout: Layout) -> list[list[str]]:
    """Return the paths of every leaf: its name in a checkpoint first; several of a tied one."""
    found: list[list[str]] = [[name] for name in leaf_names(layout)]
    marks = [torch.empty(0, device="meta") for _ in layout.slots]
    paths = named_leaves(optree.tree_unflatten(layout.treespec, marks))[0]
    for path, leaf in zip(paths, layout.slots, strict=True):
        found[leaf].append(path)
    return found


def shards_of(
    state: TrainState, rank: int, *, frozen: bool = True, shared: bool = False
) -> list[OwnShard]:
    """Return a rank's own parts of all that has elements: parameters first, then slots.

    frozen: False: without those of parameters that do not learn.
    shared: all that it holds, and not only its own part of it.
    """
    setup, learning = state.setup, state.setup.layout.trainable

    def shard(prefix: str, group: int, flat: Tensor, placement: Placement) -> OwnShard:
        part = setup.part(placement if shared else Placement.OVER_ALL, rank)
        return OwnShard(prefix, group, part, part_of(flat, setup.part(placement, rank), part))

    found = [
        shard("params", i, flat, setup.params)
        for i, flat in enumerate(state.params.flats)
        if frozen or i in learning
    ]
    for name, group, flat in slots_of(state):
        found.append(shard(f"optimizer/{name}", group, flat, setup.optimizer_state))
    return found


def cut_shards(layout: Layout, shards: Sequence[OwnShard]) -> Iterator[TensorPiece]:
    """Cut shards at the borders of leaves and blocks; padding is in no piece."""
    names = leaf_names(layout)
    for prefix, index, part, values in shards:
        for held in leaf_ranges(layout, index, part):
            name, leaf = f"{prefix}/{names[held.leaf]}", layout.leaves[held.leaf]
            here, first, last, numel = held.of(values), held.start, held.stop, leaf.numel
            if leaf.dtype.is_complex and here.dtype.itemsize >= 4:  # as its user has it
                here, first, last, numel = as_complex(here), first // 2, last // 2, numel // 2
            for start, stop in blocks(first, last, BLOCK_NUMEL):
                block = here[start - first : stop - first]
                yield TensorPiece(name=name, start=start, numel=numel, values=block)


def blocks(low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut low..high at the multiples of `size`; nothing if it is empty."""
    while low < high:
        stop = min(high, (low // size + 1) * size)
        yield low, stop
        low = stop
