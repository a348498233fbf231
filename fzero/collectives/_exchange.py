"""Collectives made of broadcasts and sends: faster on gloo than its own, and with a known order.

Sums are made in rank order on the rank that keeps them, 16-bit floats in fp32: the result depends
neither on the backend nor on the bucketing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.collectives._backend import (
    PARTLY_TYPED,
    Started,
    as_bytes,
    explained,
    in_one_go,
    is_gloo,
)
from fzero.context.here import is_abstract
from fzero.ranks.mesh import Axis
from fzero.state.buffers import SIXTEEN_BIT

Combine = Callable[..., Tensor]
"""(the parts of all ranks, own=which of them is this rank's) -> one."""


def begin_scatter_by_exchange(
    fulls: Sequence[Tensor], axis: Axis, op: str, combine: Combine | None = None
) -> Started:
    """Reduce-scatter: every rank sends each other rank its shard, and adds up what it gets.

    On gloo by single sends: an all_to_all would also copy a rank's own shard to itself, which takes
    more memory and is no faster. On nccl by an all_to_all, which is one launch.
    """
    combine = combine or sum_in_order
    if not all(is_gloo(axis, full.device) for full in fulls):
        works, received = _all_to_all(fulls, axis)
        parts = [got.chunk(axis.size) if got.numel() else [got] for got in received]
        return Started(op, axis, works, lambda: [combine(some) for some in parts], fulls)
    works, sent = _sends(fulls, axis, op)

    def finish() -> list[Tensor]:
        return [combine(some, axis.rank) for some in sent]

    return Started(op, axis, works, finish, fulls)


def begin_all_to_all_by_exchange(fulls: Sequence[Tensor], axis: Axis) -> Started:
    """Each [r l] -> [r l]: chunk s is what rank s has as its chunk for this rank."""
    works, received = _all_to_all(fulls, axis)
    return Started("all_to_all", axis, works, lambda: received, fulls)


def begin_uneven_by_exchange(
    xs: Sequence[Tensor], axis: Axis, sent: Sequence[int], received: Sequence[int]
) -> Started:
    """Each [sum(sent)] -> [sum(received)]: sent[r] rows to rank r, received[r] rows from it."""
    works, outs = list[Any](), [x.new_empty(sum(received), *x.shape[1:]) for x in xs]
    for x, out in zip(xs, outs, strict=True):
        if is_abstract():
            continue
        if is_gloo(axis, x.device):
            own, got = torch.split(x, list(sent)), torch.split(out, list(received))
            works += sends_between(own, got, axis)
            got[axis.rank].copy_(own[axis.rank])
        else:
            works.append(_single(out, x, received, sent, axis, "all_to_all"))
    return Started("all_to_all", axis, works, lambda: outs, xs)


def begin_permute_by_exchange(
    xs: Sequence[Tensor], axis: Axis, source: int | None, target: int | None
) -> Started:
    """Each [*t] -> [*t]: send it to the target, get the source's; zeros without a source."""
    mine, works = axis.rank, list[Any]()
    outs = [torch.zeros_like(x) if source is None else torch.empty_like(x) for x in xs]
    for x, out in zip(xs, outs, strict=True):
        if is_abstract():
            continue
        if source == mine:
            out.copy_(x)
        nothing = x.new_empty(0)
        own = [x if r == target and r != mine else nothing for r in range(axis.size)]
        got = [out if r == source and r != mine else nothing for r in range(axis.size)]
        if is_gloo(axis, x.device):
            works += sends_between(own, got, axis, "ppermute")
            continue
        # As an all_to_all, of which every rank of the group is a part: ranks without a pair too.
        comes, goes = ([piece.numel() for piece in some] for some in (got, own))
        into = out.view(-1) if any(comes) else nothing
        outof = x.view(-1) if any(goes) else nothing
        works.append(_single(into, outof, comes, goes, axis, "ppermute"))
    return Started("ppermute", axis, works, lambda: outs, xs)


def _single(
    out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], axis: Axis, op: str
) -> Any:
    with explained(op, axis):
        return PARTLY_TYPED.all_to_all_single(
            out, x, list(received), list(sent), group=axis.group(), async_op=True
        )


def sends_between(
    sent: Sequence[Tensor], got: Sequence[Tensor], axis: Axis, op: str = "all_to_all"
) -> list[Any]:
    """Send to, and receive from, each other rank that has something: gloo's is for equal parts."""
    group, works = axis.group(), list[Any]()
    with explained(op, axis):
        for r in (r for r in range(axis.size) if r != axis.rank):
            peer = dist.get_global_rank(group, r)
            if sent[r].numel():
                works.append(dist.isend(as_bytes(sent[r]), peer, group=group))
            if got[r].numel():
                works.append(dist.irecv(as_bytes(got[r]), peer, group=group))
    return works


def _sends(fulls: Sequence[Tensor], axis: Axis, op: str) -> tuple[list[Any], list[list[Tensor]]]:
    """Send each other rank its shard: the works, and of each full the shards that come here."""
    pieces = [list(full.chunk(axis.size)) if full.numel() else [full] * axis.size for full in fulls]
    works, parts = list[Any](), list[list[Tensor]]()
    for own in pieces:
        got = [x if r == axis.rank else torch.empty_like(x) for r, x in enumerate(own)]
        parts.append(got)
        if own[0].numel() and not is_abstract():
            works += sends_between(own, got, axis, op)
    return works, parts


def _all_to_all(fulls: Sequence[Tensor], axis: Axis) -> tuple[list[Any], list[Tensor]]:
    received = [torch.empty_like(full) for full in fulls]
    if is_abstract():
        return [], received
    works = [
        PARTLY_TYPED.all_to_all_single(
            as_bytes(got), as_bytes(full), group=axis.group(), async_op=True
        )
        for got, full in zip(received, fulls, strict=True)
        if full.numel()
    ]
    return works, received


def begin_reduce_by_exchange(
    values: Sequence[Tensor], axis: Axis, *, op: str = "all_reduce", combine: Combine | None = None
) -> Started:
    """All-reduce as a scatter and a gather, so that each element is summed in rank order.

    combine: what is done to the parts of all ranks in the place of the sum.
    """
    fulls: list[Tensor] = []
    for value in values:
        flat = value.reshape(-1)
        fulls.append(torch.nn.functional.pad(flat, (0, -flat.numel() % axis.size)))
    first = begin_scatter_by_exchange(fulls, axis, op, combine)

    def finish() -> list[Tensor]:
        outs = [torch.empty_like(full) for full in fulls]
        second = begin_gather_into(outs, first.finish(), axis)
        second._replace(op=op).wait()
        return [out[: v.numel()].view(v.shape) for out, v in zip(outs, values, strict=True)]

    return first._replace(finish=finish)


def begin_gather_into(outs: Sequence[Tensor], shards: Sequence[Tensor], axis: Axis) -> Started:
    """Gather each [l] into its [r l], which it may be a part of: on gloo one broadcast a rank."""
    if is_abstract():
        return Started("all_gather", axis, (), lambda: list(outs), shards)
    group = axis.group()
    works, native = list[Any](), list[tuple[Tensor, Tensor]]()
    for out, shard in zip(outs, shards, strict=True):
        if not out.numel():
            continue
        if not is_gloo(axis, out.device):
            native.append((out, shard))
            continue
        for rank, piece in enumerate(out.chunk(axis.size)):
            if rank == axis.rank and piece.data_ptr() != shard.data_ptr():
                piece.copy_(shard)
            source = dist.get_global_rank(group, rank)
            works.append(dist.broadcast(as_bytes(piece), source, group=group, async_op=True))
    if native:
        works += in_one_go("all_gather", native, axis)
    return Started("all_gather", axis, works, lambda: list(outs), shards)


def sum_in_order(parts: Sequence[Tensor], own: int | None = None) -> Tensor:
    """x[0] + x[1] + ..., in rank order; 16-bit floats are added in fp32 and rounded once.

    If this rank's `own` part is given, the others were received for this sum, and one of them is
    written to in the place of new memory.
    """
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
    if len(parts) == 1:
        return parts[0].clone()
    first, second = (parts[1], parts[0]) if own == 0 else (parts[0], parts[1])
    if own is None or wide is not dtype:
        total = first.to(wide) + second.to(wide)
    else:
        total = first.add_(second)
    for part in parts[2:]:
        total += part
    return total.to(dtype)
