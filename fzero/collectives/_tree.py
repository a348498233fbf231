"""Sums by one fixed binary tree over logical ranks, whatever number of ranks carries them.

A rank has the nodes of the tree that lie in its run of logical ranks; see `fzero/state/tree.py`.
It sends the r-th part of each to the rank that owns the part, which makes the rest of the tree.
Where each rank carries one logical rank these are leaves, and the wire is that of a reduce-scatter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.collectives import _lowering as lowering
from fzero.collectives._backend import PARTLY_TYPED, Started, explained, given, is_gloo
from fzero.collectives._exchange import sends_between
from fzero.collectives._functions import gather_many
from fzero.collectives._log import note
from fzero.collectives._start import InFlight
from fzero.context.here import is_abstract
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import tree
from fzero.state.logical import carried


class Over(NamedTuple):
    """What a sum by the tree is over.

    places: the logical ranks. parts: of each rank, the number of the part that it owns.
    """

    axis: Axis
    places: int
    parts: tuple[int, ...]

    @property
    def nodes(self) -> tuple[tuple[tree.Node, ...], ...]:
        """The nodes that each rank has."""
        return _nodes(self.axis.size, self.places)


@lru_cache(maxsize=64)
def _nodes(size: int, places: int) -> tuple[tuple[tree.Node, ...], ...]:
    runs = [carried(rank, size, places) for rank in range(size)]
    return tuple(tree.nodes(run.start, run.stop, places) for run in runs)


def start_tree_sum(
    held: Sequence[Sequence[Tensor]], over: Over, dtypes: Sequence[torch.dtype]
) -> InFlight:
    """Start to sum nodes over ranks: held[b] = this rank's nodes of buffer b, each [W l] -> [l].

    Given is the part of each sum that this rank owns, in the dtype of its buffer, in which the
    additions are made. A buffer has one dtype on all ranks; what is sent stays as it is.
    """
    with torch.no_grad():
        held = [[x.detach() for x in some] for some in held]
        axis = over.axis
        if axis.runtime is Runtime.LOCAL:
            (nodes,) = over.nodes
            pairs = zip(held, dtypes, strict=True)
            return InFlight(given([_fold(nodes, some, over, d) for some, d in pairs], axis), {})
        for some in held:
            numel = some[0].numel()
            away = len(some) * (numel - numel // axis.size)
            note("all_to_all", axis, len(some) * numel, some[0].dtype, sends=away)
        return InFlight(_begin(held, over, dtypes), {})


def _begin(held: Sequence[Sequence[Tensor]], over: Over, dtypes: Sequence[torch.dtype]) -> Started:
    axis, nodes = over.axis, [node for some in over.nodes for node in some]
    if axis.runtime is Runtime.VIRTUAL and not is_abstract():

        @torch.no_grad()
        def made(everyone: list[Any]) -> list[Tensor]:
            return [
                _fold(nodes, [x for rank in everyone for x in rank[b]], over, dtype)
                for b, dtype in enumerate(dtypes)
            ]

        shapes = lowering.shapes_of([some[0] for some in held])
        sums = lowering.shared(f"sum over {over.places} places[{shapes}]", held, axis, made)
        return given([_part(x, over, axis.rank).clone() for x in sums], axis)

    # Of each buffer, the chunk for each rank: a part of each node, one behind the other.
    sent = [[_joined(some, over, r) for r in range(axis.size)] for some in held]
    counts = [len(some) for some in over.nodes]
    got = [
        [
            x if r == axis.rank else x.new_empty(x.numel() // counts[axis.rank] * counts[r])
            for r, x in enumerate(chunks)
        ]
        for chunks in sent
    ]

    def finish() -> list[Tensor]:
        found: list[Tensor] = []
        for chunks, dtype in zip(got, dtypes, strict=True):
            pairs = zip(chunks, counts, strict=True)
            parts = [part for chunk, count in pairs for part in chunk.view(count, -1)]
            found.append(_fold(nodes, parts, over, dtype))
        return found

    return Started(
        "all_to_all", axis, _works(sent, got, axis), finish, [x for s in sent for x in s]
    )


def _works(
    sent: Sequence[Sequence[Tensor]], got: Sequence[Sequence[Tensor]], axis: Axis
) -> list[Any]:
    works: list[Any] = []
    if is_abstract():
        return works
    for chunks, into in zip(sent, got, strict=True):
        if not chunks[0].numel():
            continue
        if is_gloo(axis, chunks[0].device):
            works += sends_between(chunks, into, axis, "all_to_all")
            continue
        mine, nothing = axis.rank, chunks[0].new_empty(0)
        away = [nothing if r == mine else x for r, x in enumerate(chunks)]
        come = [nothing if r == mine else x for r, x in enumerate(into)]
        with explained("all_to_all", axis):
            works.append(PARTLY_TYPED.all_to_all(come, away, group=axis.group(), async_op=True))
    return works


def _part(flat: Tensor, over: Over, rank: int) -> Tensor:
    """Return the part of a flat [W l] that a rank owns: a view."""
    length = flat.numel() // over.axis.size
    return flat.narrow(0, over.parts[rank] * length, length)


def _joined(nodes: Sequence[Tensor], over: Over, rank: int) -> Tensor:
    parts = [_part(x.contiguous(), over, rank) for x in nodes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fold(
    nodes: Sequence[tree.Node], values: Sequence[Tensor], over: Over, dtype: torch.dtype
) -> Tensor:
    """Return the sum of all places, in memory of its own."""
    if len(values) == 1:
        return values[0].to(dtype, copy=True)
    wide = ((node, x.to(dtype)) for node, x in zip(nodes, values, strict=True))
    return tree.fold(wide, over.places, operator.add)


def fold_rows(rows: Tensor) -> Tensor:
    """Return the sum of rows [L, *t] -> [*t] by the tree, level by level.

    Example:
        >>> fold_rows(torch.tensor([[1.0], [2.0], [3.0]]))
        tensor([6.])
    """
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        sums = rows[0:even:2] + rows[1:even:2]
        rows = torch.cat([sums, rows[even:]])
    return rows[0]


def gather_rows(rows: Tensor, axis: Axis, places: int) -> Tensor:
    """Return a row of each logical rank, [L, *t], of those that each rank carries, [k, *t].

    It is differentiable, as `gather_many` is.
    """
    return _gathered(rows, axis, places, lambda padded: gather_many([padded], axis)[0])


def gather_values(rows: Tensor, axis: Axis, places: int) -> Tensor:
    """`gather_rows` without a derivative: for what is inside of a collective itself."""
    return _gathered(
        rows, axis, places, lambda padded: lowering.begin_all_gather([padded], axis).wait()[0]
    )


def _gathered(rows: Tensor, axis: Axis, places: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
    if axis.runtime is Runtime.LOCAL:
        return rows
    counts = [len(carried(rank, axis.size, places)) for rank in range(axis.size)]
    most = max(counts)
    if len(rows) < most:
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    every = gather(rows.contiguous())
    if min(counts) == most:
        return every
    each = torch.unflatten(every, 0, (axis.size, most))
    return torch.cat([some[:count] for some, count in zip(each, counts, strict=True)])
