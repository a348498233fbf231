"""Collectives made of broadcasts and sends: faster on gloo than its own, and with a known order.

Sums are made in rank order on the rank that keeps them, 16-bit floats in fp32: the result depends
neither on the backend nor on the bucketing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.collectives._backend import Started, as_bytes, explained, in_one_go, is_gloo
from fzero.context.here import is_abstract
from fzero.ranks.mesh import Axis
from fzero.state.buffers import SIXTEEN_BIT


def begin_scatter_by_exchange(fulls: Sequence[Tensor], axis: Axis, op: str) -> Started:
    """Reduce-scatter: every rank sends each other rank its shard, and adds up what it gets.

    On gloo by single sends: an all_to_all would also copy a rank's own shard to itself, which takes
    more memory and is no faster. On nccl by an all_to_all, which is one launch.
    """
    if not all(is_gloo(axis, full.device) for full in fulls):
        works, received = _all_to_all(fulls, axis)
        parts = [got.chunk(axis.size) if got.numel() else [got] for got in received]
        return Started(op, axis, works, lambda: [sum_in_order(some) for some in parts], fulls)
    works, sent = _sends(fulls, axis, op)

    def finish() -> list[Tensor]:
        return [sum_in_order(some, axis.rank) for some in sent]

    return Started(op, axis, works, finish, fulls)


def begin_all_to_all_by_exchange(fulls: Sequence[Tensor], axis: Axis) -> Started:
    """Each [r l] -> [r l]: chunk s is what rank s has as its chunk for this rank."""
    if all(is_gloo(axis, full.device) for full in fulls):
        works, parts = _sends(fulls, axis, "all_to_all")
        return Started("all_to_all", axis, works, lambda: list(map(torch.cat, parts)), fulls)
    works, received = _all_to_all(fulls, axis)
    return Started("all_to_all", axis, works, lambda: received, fulls)


def _sends(fulls: Sequence[Tensor], axis: Axis, op: str) -> tuple[list[Any], list[list[Tensor]]]:
    """Send each other rank its shard: the works, and of each full the shards that come here."""
    pieces = [list(full.chunk(axis.size)) if full.numel() else [full] * axis.size for full in fulls]
    works, parts = [], []
    for own in pieces:
        got = [x if r == axis.rank else torch.empty_like(x) for r, x in enumerate(own)]
        parts.append(got)
        if own[0].numel() and not is_abstract():
            works += _sent(own, got, axis, op)
    return works, parts


def _sent(own: Sequence[Tensor], got: Sequence[Tensor], axis: Axis, op: str) -> list[Any]:
    """Send own[r] to each other rank r, and receive got[r] from it."""
    group, works = axis.group(), []
    with explained(op, axis):  # after a timeout it raises where it starts
        for r in range(axis.size):
            if r != axis.rank:
                peer = dist.get_global_rank(group, r)
                works.append(dist.isend(as_bytes(own[r]), peer, group=group))
                works.append(dist.irecv(as_bytes(got[r]), peer, group=group))
    return works


def _all_to_all(fulls: Sequence[Tensor], axis: Axis) -> tuple[list[Any], list[Tensor]]:
    received = [torch.empty_like(full) for full in fulls]
    if is_abstract():
        return [], received
    works = [
        dist.all_to_all_single(got, full, group=axis.group(), async_op=True)
        for got, full in zip(received, fulls, strict=True)
        if full.numel()
    ]
    return works, received


def begin_reduce_by_exchange(values: Sequence[Tensor], axis: Axis) -> Started:
    """All-reduce as a scatter and a gather, so that each element is summed in rank order."""
    fulls = []
    for value in values:
        flat = value.reshape(-1)
        fulls.append(torch.nn.functional.pad(flat, (0, -flat.numel() % axis.size)))
    first = begin_scatter_by_exchange(fulls, axis, "all_reduce")

    def finish() -> list[Tensor]:
        outs = [torch.empty_like(full) for full in fulls]
        second = begin_gather_into(outs, first.finish(), axis)
        second._replace(op="all_reduce").wait()
        return [out[: v.numel()].view(v.shape) for out, v in zip(outs, values, strict=True)]

    return first._replace(finish=finish)


def begin_gather_into(outs: Sequence[Tensor], shards: Sequence[Tensor], axis: Axis) -> Started:
    """Gather each [l] into its [r l], which it may be a part of: on gloo one broadcast a rank."""
    if is_abstract():
        return Started("all_gather", axis, (), lambda: list(outs), shards)
    group = axis.group()
    works, native = [], []
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
