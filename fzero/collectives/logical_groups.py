"""Logical ranks: their sums by one tree, and losses in which they run together.

A sum is made by one fixed binary tree over logical ranks, whatever number of ranks carries them.
A rank has the nodes of the tree that lie in its run of logical ranks; see `fzero/state/logical.py`.
It sends the r-th part of each to the rank that owns the part, which makes the rest of the tree.
Where each rank carries one logical rank these are leaves, and the wire is that of a reduce-scatter.

A collective in a loss of logical ranks needs all L of them at one place. Each rank runs its own as
virtual ranks; the one that comes last asks the other ranks for their rows, and makes the result as
virtual ranks of one process make it, from all L values in order. So its bits, and the order of its
sums, are those of L ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from fzero.collectives import lowering
from fzero.collectives.autograd import gather_many
from fzero.collectives.log import note
from fzero.collectives.lowering import (
    InFlight,
    Told,
    any_of,
    given,
)
from fzero.collectives.performer import performer_of
from fzero.context.current_rank import Here, Make, be, current_ranks, is_abstract, standing_as
from fzero.context.modes import for_training
from fzero.errors import PhaseError
from fzero.ranks.mesh import Axis, Carried, Runs, Runtime, carrying, running_on
from fzero.ranks.virtual import run_ranks
from fzero.state import logical
from fzero.state.logical import carried


class Over(NamedTuple):
    """What a sum by the tree is over.

    places: the logical ranks. parts: of each rank, the number of the part that it owns.
    """

    axis: Axis
    places: int
    parts: tuple[int, ...]

    @property
    def nodes(self) -> tuple[tuple[logical.Node, ...], ...]:
        """The nodes that each rank has."""
        return _nodes(self.axis.size, self.places)


@lru_cache(maxsize=64)
def _nodes(size: int, places: int) -> tuple[tuple[logical.Node, ...], ...]:
    runs = [carried(rank, size, places) for rank in range(size)]
    return tuple(logical.nodes(run.start, run.stop, places) for run in runs)


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
            return given([_fold(nodes, some, over, d) for some, d in pairs], axis)
        for some in held:
            numel = some[0].numel()
            away = len(some) * (numel - numel // axis.size)
            note("all_to_all", axis, len(some) * numel, some[0].dtype, sends=away)
        return _begin(held, over, dtypes)


def _begin(held: Sequence[Sequence[Tensor]], over: Over, dtypes: Sequence[torch.dtype]) -> InFlight:
    axis, nodes = over.axis, [node for some in over.nodes for node in some]
    if axis.runtime is Runtime.VIRTUAL and not is_abstract():

        @torch.no_grad()
        def made(everyone: list[Any]) -> list[Tensor]:
            return [
                _fold(nodes, [x for rank in everyone for x in rank[b]], over, dtype)
                for b, dtype in enumerate(dtypes)
            ]

        shapes = lowering.shapes_of([some[0] for some in held])
        sums = lowering.on_virtual_ranks(f"sum over {over.places} places", held, axis, made, shapes)
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

    works = list[Any]()
    for chunks, into in zip(sent, got, strict=True):
        if chunks[0].numel() and not is_abstract():
            works += lowering.exchange_chunks(chunks, into, axis)
    return InFlight("all_to_all", axis, works, finish, [x for s in sent for x in s])


def _part(flat: Tensor, over: Over, rank: int) -> Tensor:
    """Return the part of a flat [W l] that a rank owns: a view."""
    length = flat.numel() // over.axis.size
    return flat.narrow(0, over.parts[rank] * length, length)


def _joined(nodes: Sequence[Tensor], over: Over, rank: int) -> Tensor:
    parts = [_part(x.contiguous(), over, rank) for x in nodes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fold(
    nodes: Sequence[logical.Node], values: Sequence[Tensor], over: Over, dtype: torch.dtype
) -> Tensor:
    """Return the sum of all places, in memory of its own."""
    if len(values) == 1:
        return values[0].to(dtype, copy=True)
    wide = ((node, x.to(dtype)) for node, x in zip(nodes, values, strict=True))
    return logical.fold(wide, over.places, operator.add)


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


T = TypeVar("T")


def run_together(body: Callable[[int], T], carried: Carried, axis: Axis) -> list[T]:
    """Run `body(place)` for each logical rank of this rank; return the results in their order.

    In it they are ranks of an axis of all logical ranks. All ranks of `axis` call it. The first
    exception of a logical rank is raised here; other ranks hear of it from who catches it.
    """
    outer = current_ranks()
    ended: list[BaseException] = []  # the run of this rank itself, while it waited for others
    met = [""]  # the call of which all ranks were told last: its values are exchanged next
    runtime = Runtime.LOCAL if carried.size == 1 else Runtime.VIRTUAL
    logical = Axis(name=axis.name, size=carried.size, runtime=runtime)

    def one(place: int) -> T:
        here = current_ranks()
        assert here is not None
        among = here.exchange

        def exchange(op: str, value: Any, make: Make) -> Any:
            def made(own: list[Any]) -> Any:
                try:
                    with standing_as(outer):
                        everyone = for_training(_of_all, op, own, carried.size, axis, met)
                except Exception:
                    raise
                except BaseException as error:
                    ended.append(error)
                    raise PhaseError(
                        f"{op}: the run of this rank was ended.",
                        cause="an error of another rank, or an interrupt.",
                        fix="see that error.",
                    ) from None
                return make(everyone)

            return among(op, value, made)

        be(Here(carried.ranks[place], carried.size, exchange, {}))
        now = Carried(carried.size, carried.ranks, carried.ranks[place], Runs.TOGETHER)
        with running_on(logical), carrying(now):
            return body(place)

    try:
        names = [f"logical rank {rank}" for rank in carried.ranks]
        return run_ranks(one, len(names), names)
    except BaseException:
        if ended:
            raise ended[0] from None
        raise


@torch.no_grad()
def _of_all(op: str, own: Sequence[Any], size: int, axis: Axis, met: list[str]) -> list[Any]:
    """Return the values of all logical ranks, of which this rank has some. A collective."""
    performer = performer_of(axis)
    if performer is None:
        return list(own)
    called, text = op.partition("[")[0], f"{op} of logical ranks in a loss"
    if isinstance(own[0], Told):
        met[0] = called
        return list(performer.call_with(text, lambda: any_of(own)))
    if called != met[0]:
        performer.call(text)
    met[0] = ""
    values = [_tensors(op, value, size) for value in own]
    columns = [_column(column, size, axis) for column in zip(*values, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _tensors(op: str, value: Any, size: int) -> list[Tensor]:
    several = isinstance(value, list | tuple)
    given = [*cast("Sequence[Any]", value)] if several else [value]
    if all(isinstance(x, Tensor) for x in given):
        return given
    raise PhaseError(
        f"{op} in a loss, where ranks carry several logical ranks.",
        cause="a call that tells other ranks what is no tensor.",
        fix=f"make it outside of the loss, or run it on {size} ranks.",
    )


def _column(own: Sequence[Tensor], size: int, axis: Axis) -> Sequence[Tensor]:
    if not own[0].numel():
        return [own[0]] * size
    return gather_values(torch.stack([*own]), axis, size).unbind()
