"""How a collective runs: on virtual ranks, on gloo, on nccl.

Every function takes a list of buffers and starts all of them before it waits for the first, for
a collective costs its latency whatever its size. `begin_*` stops there and returns what is
`Started`. None of them knows about autograd.

The choices for gloo are measured (`benchmarks/collectives.py`): its reduce_scatter moves the
bytes of an all_reduce, so an all_to_all with a local sum in rank order is used (which is
deterministic, and can add 16-bit floats in fp32); its all_gather is slower than one broadcast
from each rank. A group may have a backend for each kind of device; the tensors decide.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.collectives._backend import (
    PARTLY_TYPED,
    as_bytes,
    explained,
    given,
    in_one_go,
    is_gloo,
    wait_for,
)
from fzero.collectives._backend import Started as Started
from fzero.collectives._exchange import (
    begin_all_to_all_by_exchange,
    begin_gather_into,
    begin_permute_by_exchange,
    begin_reduce_by_exchange,
    begin_scatter_by_exchange,
    begin_uneven_by_exchange,
    sum_in_order,
)
from fzero.collectives._log import note
from fzero.context.here import current_ranks, has_no_values, is_abstract, require_no_trace
from fzero.ranks.mesh import Axis, Runtime
from fzero.ranks.virtual import different
from fzero.state.buffers import SIXTEEN_BIT

_TORCH: Any = torch  # what it has no types for

# said: of a user's call, what virtual ranks compare when they exchange values.


def begin_all_gather(shards: Sequence[Tensor], axis: Axis, *, said: str = "") -> Started:
    """Start to give each [l, *t] -> [r l, *t], the ranks' shards in rank order."""
    shards = [shard.contiguous() for shard in shards]
    if is_abstract():
        outs = _as_op("all_gather", shards, axis)
        started = Started("all_gather", axis, (), lambda: outs, shards)
    elif axis.runtime is Runtime.VIRTUAL:
        outs = _swap(said or "all_gather", shards, axis, torch.cat)
        started = Started("all_gather", axis, (), lambda: [out.clone() for out in outs])
    else:
        outs = [shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        started = begin_gather_into(outs, shards, axis)
    for out in outs:
        note("all_gather", axis, out.numel(), out.dtype)
    return started


def begin_reduce_scatter(
    fulls: Sequence[Tensor], axis: Axis, *, ordered: bool, said: str = ""
) -> Started:
    """Start to give each [r l, *t] -> [l, *t]: this rank's shard of the sum over ranks."""
    fulls = [full.contiguous() for full in fulls]
    for full in fulls:
        note("reduce_scatter", axis, full.numel(), full.dtype)
    if _is_op(fulls):
        return given(_as_op("reduce_scatter", fulls, axis, ordered), axis)
    if swaps(axis):
        sums = _swap(said or "reduce_scatter", fulls, axis, sum_in_order)
        return given([_own_rows(x, axis).clone() for x in sums], axis)
    if ordered or any(is_gloo(axis, full.device) for full in fulls):
        return begin_scatter_by_exchange(fulls, axis, "reduce_scatter")
    outs = [full.new_empty(full.shape[0] // axis.size, *full.shape[1:]) for full in fulls]
    works = in_one_go("reduce_scatter", list(zip(outs, fulls, strict=True)), axis)
    return Started("reduce_scatter", axis, works, lambda: outs, fulls)


def begin_all_to_all(fulls: Sequence[Tensor], axis: Axis, *, said: str = "") -> Started:
    """Start to give each [r l] -> [r l]: chunk s is what rank s has as its chunk for this rank."""
    for full in fulls:
        note("all_to_all", axis, full.numel(), full.dtype)
    if _is_op(fulls):
        return given(_as_op("all_to_all", fulls, axis), axis)
    if swaps(axis):
        every = _swap(said or "all_to_all", fulls, axis, torch.stack)  # [from, to l]
        mine = [_cut(x, axis)[:, axis.rank] for x in every]
        form = torch.contiguous_format
        return given([x.clone(memory_format=form).flatten(0, 1) for x in mine], axis)
    return begin_all_to_all_by_exchange([full.contiguous() for full in fulls], axis)


def begin_uneven_all_to_all(
    xs: Sequence[Tensor],
    axis: Axis,
    sent: Sequence[int],
    received: Sequence[int],
    *,
    said: str = "",
) -> Started:
    """Start to give each [sum(sent), *t] -> [sum(received), *t].

    sent[r] rows go to rank r, in order; received[r] rows come from it, in rank order.
    """
    xs = [x.contiguous() for x in xs]
    for x in xs:
        width = x[0].numel() if len(x) else x.new_empty(1, *x.shape[1:], device="meta").numel()
        away = sum(sent) - sent[axis.rank]
        note("all_to_all", axis, x.numel(), x.dtype, sends=away * width)
    if _is_op(xs):
        return given(_as_op("uneven_all_to_all", xs, axis, list(sent), list(received)), axis)
    if swaps(axis):
        shapes = shapes_of(xs, ragged=True)
        parts = [
            swap_parts(said or "all_to_all", torch.split(x, list(sent)), axis, shapes) for x in xs
        ]
        return given([torch.cat(some) for some in parts], axis)
    return begin_uneven_by_exchange(xs, axis, sent, received)


def begin_permute(
    xs: Sequence[Tensor],
    axis: Axis,
    sources: Sequence[int],
    destinations: Sequence[int],
    *,
    said: str = "",
) -> Started:
    """Start to give each [*t] -> [*t]: what the source of this rank has; zeros if it has none."""
    mine = axis.rank
    source = dict(zip(destinations, sources, strict=True)).get(mine)
    target = dict(zip(sources, destinations, strict=True)).get(mine)
    xs = [x.contiguous() for x in xs]
    for x in xs:
        away = x.numel() if target not in (None, mine) else 0
        note("ppermute", axis, x.numel(), x.dtype, sends=away if x.numel() else None)
    if _is_op(xs):
        return given(_as_op("ppermute", xs, axis, list(sources), list(destinations)), axis)
    if swaps(axis):
        pairs = dict(zip(destinations, sources, strict=True))

        def made(everyone: list[Tensor]) -> Any:
            # A copy for each rank that gets one: the sender may write into its own afterwards.
            return {to: everyone[of].clone() for to, of in pairs.items()}

        op = said or f"ppermute by {sorted(zip(sources, destinations, strict=True))}"
        every: Any = _swap(op, xs, axis, made)
        outs = [
            got.pop(mine) if mine in got else torch.zeros_like(x)
            for got, x in zip(every, xs, strict=True)
        ]
        return given(outs, axis)
    return begin_permute_by_exchange(xs, axis, source, target)


def begin_extremum(values: Sequence[Tensor], axis: Axis, op: str) -> Started:
    """Start to give each [*t] -> [*t]: the largest ("pmax") or smallest ("pmin") of all ranks'.

    A NaN of any rank is the result, on every backend: it is gathered by exchange, as gloo and nccl
    compare NaN in other ways.
    """
    for value in values:
        note(op, axis, value.numel(), value.dtype)
    if _is_op(values):
        return given(_as_op(op, values, axis), axis)

    def of_all(parts: Sequence[Tensor], own: int | None = None) -> Tensor:
        stacked = torch.stack(list(parts))
        return stacked.amax(0) if op == "pmax" else stacked.amin(0)

    if swaps(axis):
        return given([x.clone() for x in _swap(op, values, axis, of_all)], axis)
    return begin_reduce_by_exchange(values, axis, op=op, combine=of_all)


def begin_all_reduce(
    values: Sequence[Tensor],
    axis: Axis,
    *,
    ordered: bool,
    owned: bool = False,
    said: str = "",
) -> Started:
    """Start to give each [*t] -> [*t]: the sum over ranks, on every rank.

    It may write into values that are `owned`. Summed by exchange, its gather is communicated when
    it is waited for.
    """
    for value in values:
        note("all_reduce", axis, value.numel(), value.dtype)
    if _is_op(values):
        return given(_as_op("all_reduce", values, axis, ordered), axis)
    if swaps(axis):
        sums = _swap(said or "all_reduce", values, axis, sum_in_order)
        return given([x.clone() for x in sums], axis)
    if ordered or any(v.dtype in SIXTEEN_BIT and is_gloo(axis, v.device) for v in values):
        return begin_reduce_by_exchange(values, axis)
    outs = list(values)
    if not owned:
        outs = [value.clone(memory_format=torch.contiguous_format) for value in values]
    if is_abstract():
        return given(outs, axis)
    works = [PARTLY_TYPED.all_reduce(out, group=axis.group(), async_op=True) for out in outs]
    return Started("all_reduce", axis, works, lambda: outs)


def begin_gather_in_place(fulls: Sequence[Tensor], axis: Axis) -> Started:
    """Each [r l], right in the shard of this rank: start to fill in the others. Gives `fulls`."""
    for full in fulls:
        note("all_gather", axis, full.numel(), full.dtype)
    shards = [_own_rows(full, axis) for full in fulls]
    if _is_op(fulls):
        for full, whole in zip(fulls, _as_op("all_gather", shards, axis), strict=True):
            full.copy_(whole)
        return given(fulls, axis)
    if swaps(axis):
        for full, whole in zip(fulls, _swap("all_gather", shards, axis, torch.cat), strict=True):
            full.copy_(whole)
        return given(fulls, axis)
    return begin_gather_into(fulls, shards, axis)


def broadcast(values: Sequence[Tensor], axis: Axis, source: int) -> list[Tensor]:
    """Each [*t] -> [*t]: the values of one rank of the axis, on every rank."""
    for value in values:
        note("broadcast", axis, value.numel(), value.dtype)
    if is_abstract():
        return [value.clone() for value in values]  # the same on every rank
    if axis.runtime is Runtime.VIRTUAL:
        # A copy for each rank: ranks may write into what they hold.
        sent = _swap(f"broadcast from {source}", values, axis, lambda xs: xs[source].clone())
        return [x.clone() for x in sent]
    group = axis.group()
    outs = [value.contiguous().clone() for value in values]
    root = dist.get_global_rank(group, source)
    works: list[Any] = [
        dist.broadcast(as_bytes(out), root, group=group, async_op=True) for out in outs
    ]
    wait_for(works, "broadcast", axis)
    return outs


def begin_exchange(
    codes: Sequence[int],
    axis: Axis,
    read: Callable[[list[list[int]]], Any],
    *,
    width: int,
    said: str = "",
) -> Started:
    """Start to give one value, `read([r, width])`: of every rank's `codes`, filled up with zeros.

    Virtual ranks share it. `axis` is one of fzero's own, over gloo: so no rank waits for its GPU.
    `said` is for logs: what this rank says, in words. An all_gather of gloo goes around a ring, one
    rank after the other; an all_to_all sends to all at once.
    """
    filled = [*codes, *[0] * (width - len(codes))]
    if axis.runtime is Runtime.LOCAL:
        return given([read([filled])], axis)
    note("agree", axis, width * axis.size, torch.int64, said)
    if axis.runtime is Runtime.VIRTUAL:
        return given([_exchange("a call of fzero", filled, axis, read)], axis)
    # Of host memory, which takes a tenth of the time that torch.tensor does. A fake group sends
    # nothing: there all ranks say what this one does.
    numbers = array("q", filled * axis.size)
    mine, out = (torch.frombuffer(array("q", numbers), dtype=torch.int64) for _ in range(2))
    with explained("agree", axis):
        work = PARTLY_TYPED.all_to_all_single(out, mine, group=axis.group(), async_op=True)
    rows: Any = out.view(axis.size, width)  # tolist() has no types
    return Started("agree", axis, [work], lambda: [read(rows.tolist())], [mine])


def gather_objects(
    value: Any, axis: Axis, make: Callable[[list[Any]], list[Any]] = list
) -> list[Any]:
    """Return every rank's picklable `value` in rank order, or what all ranks alike `make` of it."""
    if axis.runtime is Runtime.LOCAL:
        return make([value])
    if axis.runtime is Runtime.VIRTUAL:
        return list(_exchange("gather_objects", value, axis, make))
    out: list[Any] = [None] * axis.size
    with explained("gather_objects", axis), _TORCH._C._DisableFuncTorch():  # also in a transform
        PARTLY_TYPED.all_gather_object(out, value, group=axis.group())
    return make(out)


def _swap(
    op: str,
    values: Sequence[Tensor],
    axis: Axis,
    make: Callable[[list[Tensor]], Tensor],
) -> list[Tensor]:
    """Exchange buffers between virtual ranks; return, for each, the result over all ranks.

    All ranks get the same tensors, to be copied from: a rank may write into what it holds.
    """

    @torch.no_grad()
    def made(everyone: list[Sequence[Tensor]]) -> list[Tensor]:
        return [make(list(per_rank)) for per_rank in zip(*everyone, strict=True)]

    return _exchange(op, _detached(values), axis, made, shapes_of(values))


def _detached(values: Sequence[Tensor]) -> list[Tensor]:
    """Return what another rank reads: under `remat` it would take a gradient of it for lost."""
    return [value.detach() for value in values]


def shared(what: str, value: Any, axis: Axis, make: Callable[[list[Any]], Any]) -> Any:
    """Return what is made, once for all virtual ranks, of what each of them hands in."""
    return _exchange(what, value, axis, make)


def shapes_of(values: Sequence[Tensor], *, ragged: bool = False) -> str:
    """Return the shapes and dtypes of tensors, as ranks compare them and errors show them.

    ragged: ranks may have other numbers of rows.
    """
    shapes = [tuple(v.shape) for v in values]
    texts = [f"({', '.join(map(str, ['*', *shape[1:]]))})" for shape in shapes if ragged]
    return ", ".join(
        f"{shape} {str(v.dtype).removeprefix('torch.')}"
        for shape, v in zip(texts or shapes, values, strict=True)
    )


def swap_parts(op: str, sent: Sequence[Tensor], axis: Axis, shapes: str = "") -> list[Tensor]:
    """Give to virtual rank r what each rank has as its sent[r]."""

    def made(everyone: list[Sequence[Tensor]]) -> list[list[Tensor]]:
        ranks = range(len(everyone))
        return [
            [everyone[s][r] if r == s else everyone[s][r].clone() for s in ranks] for r in ranks
        ]

    return _exchange(op, _detached(sent), axis, made, shapes)[axis.rank]


def _cut(every: Tensor, axis: Axis) -> Tensor:
    """[from, to l, *t] -> [from, to, l, *t]: a view."""
    return torch.unflatten(every, 1, (axis.size, every.shape[1] // axis.size))


def _own_rows(full: Tensor, axis: Axis) -> Tensor:
    """[r l, *t] -> [l, *t]: the rows of this rank, a view."""
    length = full.shape[0] // axis.size
    return full.narrow(0, axis.rank * length, length)


def swaps(axis: Axis) -> bool:
    """Whether the ranks of an axis are virtual."""
    return axis.runtime is Runtime.VIRTUAL and not is_abstract()


def _is_op(xs: Sequence[Tensor]) -> bool:
    """Whether a collective of an abstract rank is one op, to be recorded; values are refused by it.

    Of tensors without values it takes the memory that it takes on a real rank, and sends nothing.
    """
    return is_abstract() and (get_proxy_mode() is not None or not all(map(has_no_values, xs)))


def _as_op(name: str, xs: Sequence[Tensor], axis: Axis, *rest: Any) -> list[Tensor]:
    """The collective as one op, of which an abstract rank has the shapes alone."""
    group = axis.group().group_name if axis.group_name else ""
    op = getattr(torch.ops.fzero, name)
    return op(list(xs), axis.name, group, axis.size, *(rest or (False,))) if xs else []


def _exchange(
    op: str, value: Any, axis: Axis, make: Callable[[list[Any]], Any], shapes: str = ""
) -> Any:
    """Hand in this rank's value; return what is made of those of the ranks of the axis.

    It is made once, for all of them. All virtual ranks come, also over a part, and make the same
    call; those of each part with the same `shapes`.
    """
    axis.rank  # noqa: B018 - raises AxisError, with the fix, when no virtual ranks run here
    ranks: Any = current_ranks()
    if axis.whole is not None:
        return _of_parts(op, value, axis, make, shapes)[axis.first(ranks.rank)]
    what = f"{axis.group_name} {op}{f'[{shapes}]' * bool(shapes)}".strip()
    require_no_trace(what)
    return ranks.exchange(what, value, make)


class Told(tuple[int, ...]):
    """What a rank says of a call, in bits; logical ranks of one rank say it together."""

    __slots__ = ()


def told(op: str, said: Sequence[int], axis: Axis, shapes: str = "") -> list[tuple[int, ...]]:
    """Return what virtual ranks say of a call that all of them make: those of all parts."""
    if axis.whole is None:
        return [_exchange(op, Told(said), axis, any_of, shapes)]
    return [*_of_parts(op, Told(said), axis, any_of, shapes).values()]


def any_of(everyone: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return what any rank says, bit by bit."""
    columns: list[tuple[int, ...]] = [*zip(*everyone, strict=True)]
    return tuple([functools.reduce(int.__or__, bits) for bits in columns])


def _of_parts(
    op: str, value: Any, axis: Axis, make: Callable[[list[Any]], Any], shapes: str
) -> dict[int, Any]:
    """Return what is made for each part of the ranks, by its first rank."""
    axis.rank  # noqa: B018 - as in `_exchange`
    ranks: Any = current_ranks()
    dim = f" over {axis.name!r}"
    what = f"{axis.group_name} {op}{f'[{shapes}]' * bool(shapes)}{dim}".strip()
    require_no_trace(what)

    def of_each_part(everyone: list[Any]) -> dict[int, Any]:
        parts = axis.parts(everyone)
        if any(len({said for said, _ in some}) > 1 for some in parts.values()):
            raise different({f"rank {rank}": said for rank, (said, _) in enumerate(everyone)})
        return {first: make([given for _, given in some]) for first, some in parts.items()}

    return ranks.exchange(op + dim, (what, value), of_each_part)
