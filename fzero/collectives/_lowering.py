"""How a collective runs: on virtual ranks, on gloo, on nccl. The only calls of torch.distributed.

Every function takes a list of buffers and starts all of them before it waits for the first, for
a collective costs its latency whatever its size. None of them knows about autograd.

The choices for gloo are measured (`benchmarks/collectives.py`): its reduce_scatter moves the
bytes of an all_reduce, so an all_to_all with a local sum in rank order is used (which is
deterministic, and can add 16-bit floats in fp32); its all_gather is slower than one broadcast
from each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.collectives._log import note
from fzero.mesh import Axis, Runtime
from fzero.virtual import current_ranks

_LOW = (torch.float16, torch.bfloat16)


def all_gather(shards: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Each [l, *t] -> [r l, *t], the ranks' shards in rank order."""
    shards = [shard.contiguous() for shard in shards]
    if axis.runtime is Runtime.VIRTUAL:
        outs = [torch.cat(per_rank) for per_rank in _swap("all_gather", shards, axis)]
    else:
        outs = [shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        _gather_into(outs, shards, axis)
    for out in outs:
        note("all_gather", axis, out.numel(), out.dtype)
    return outs


def reduce_scatter(fulls: Sequence[Tensor], axis: Axis, *, ordered: bool) -> list[Tensor]:
    """Each [r l, *t] -> [l, *t]: this rank's rows of the sum over ranks."""
    fulls = [full.contiguous() for full in fulls]
    for full in fulls:
        note("reduce_scatter", axis, full.numel(), full.dtype)
    if axis.runtime is Runtime.VIRTUAL:
        per_buffer = _swap("reduce_scatter", fulls, axis)
        rows = [
            slice(
                axis.rank * (f.shape[0] // axis.size), (axis.rank + 1) * (f.shape[0] // axis.size)
            )
            for f in fulls
        ]
        return [
            _sum_in_order([x[row] for x in xs]) for xs, row in zip(per_buffer, rows, strict=True)
        ]
    group = axis.group()
    if _is_gloo(group) or ordered:
        return _scatter_by_exchange(fulls, axis, group)
    outs = [full.new_empty(full.shape[0] // axis.size, *full.shape[1:]) for full in fulls]
    with dist._coalescing_manager(group, async_ops=True) as work:
        for out, full in zip(outs, fulls, strict=True):
            _native("reduce_scatter")(out, full, group=group)
    work.wait()
    return outs


def all_reduce(
    values: Sequence[Tensor], axis: Axis, *, ordered: bool, owned: bool = False
) -> list[Tensor]:
    """Each [*t] -> [*t]: the sum over ranks, on every rank; in place if they are `owned`."""
    for value in values:
        note("all_reduce", axis, value.numel(), value.dtype)
    if axis.runtime is Runtime.VIRTUAL:
        return [_sum_in_order(xs) for xs in _swap("all_reduce", values, axis)]
    group = axis.group()
    by_exchange = ordered or (_is_gloo(group) and any(v.dtype in _LOW for v in values))
    if by_exchange:
        return _reduce_by_exchange(values, axis, group)
    outs = list(values)
    if not owned:
        outs = [value.clone(memory_format=torch.contiguous_format) for value in values]
    _wait([dist.all_reduce(out, group=group, async_op=True) for out in outs])
    return outs


def broadcast_first(values: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Each [*t] -> [*t]: the values of rank 0 of the axis, on every rank."""
    for value in values:
        note("broadcast", axis, value.numel(), value.dtype)
    if axis.runtime is Runtime.VIRTUAL:
        # A copy for each rank: ranks may write into what they hold.
        return [per_rank[0].clone() for per_rank in _swap("broadcast", values, axis)]
    group = axis.group()
    outs = [value.contiguous().clone() for value in values]
    source = dist.get_global_rank(group, 0)
    _wait([dist.broadcast(out, source, group=group, async_op=True) for out in outs])
    return outs


def gather_in_place(fulls: Sequence[Tensor], axis: Axis) -> None:
    """Each [r l]: rows of rank r are right on rank r only; make them right on every rank."""
    for full in fulls:
        note("all_gather", axis, full.numel(), full.dtype)
    shards = [full.chunk(axis.size)[axis.rank] for full in fulls]
    if axis.runtime is Runtime.VIRTUAL:
        for full, per_rank in zip(fulls, _swap("all_gather", shards, axis), strict=True):
            full.copy_(torch.cat(per_rank))
    else:
        _gather_into(fulls, shards, axis)


def exchange_ids(code: int, axis: Axis) -> list[int]:
    """Return every rank's `code` in rank order: eight bytes from each."""
    note("agree", axis, axis.size, torch.int64)
    if axis.runtime is Runtime.VIRTUAL:
        return [int(c) for c in _ranks(axis).exchange("agree", code)]
    group = axis.group()
    device = (
        torch.device("cpu")
        if _is_gloo(group)
        else torch.device("cuda", torch.cuda.current_device())
    )
    out = torch.empty(axis.size, dtype=torch.int64, device=device)
    _native("all_gather")(out, torch.tensor([code], dtype=torch.int64, device=device), group=group)
    return out.tolist()


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable `value` in rank order."""
    if axis.runtime is Runtime.LOCAL:
        return [value]
    if axis.runtime is Runtime.VIRTUAL:
        return _ranks(axis).exchange("gather_objects", value)
    out: list[Any] = [None] * axis.size
    dist.all_gather_object(out, value, group=axis.group())
    return out


def _gather_into(outs: Sequence[Tensor], shards: Sequence[Tensor], axis: Axis) -> None:
    group = axis.group()
    if not _is_gloo(group):
        with dist._coalescing_manager(group, async_ops=True) as work:
            for out, shard in zip(outs, shards, strict=True):
                _native("all_gather")(out, shard, group=group)
        work.wait()
        return
    works = []
    for out, shard in zip(outs, shards, strict=True):
        for rank, rows in enumerate(out.chunk(axis.size) if out.numel() else ()):
            if rank == axis.rank and rows.data_ptr() != shard.data_ptr():
                rows.copy_(shard)
            source = dist.get_global_rank(group, rank)
            works.append(dist.broadcast(rows, source, group=group, async_op=True))
    _wait(works)


def _scatter_by_exchange(
    fulls: Sequence[Tensor], axis: Axis, group: dist.ProcessGroup
) -> list[Tensor]:
    received = [torch.empty_like(full) for full in fulls]
    works = [
        dist.all_to_all_single(got, full, group=group, async_op=True)
        for got, full in zip(received, fulls, strict=True)
        if full.numel()
    ]
    _wait(works)
    return [_sum_in_order(got.chunk(axis.size)) if got.numel() else got for got in received]


def _reduce_by_exchange(
    values: Sequence[Tensor], axis: Axis, group: dist.ProcessGroup
) -> list[Tensor]:
    """All-reduce as a scatter and a gather, so that each element is summed in rank order."""
    fulls = []
    for value in values:
        flat = value.reshape(-1)
        fulls.append(torch.nn.functional.pad(flat, (0, -flat.numel() % axis.size)))
    outs = [torch.empty_like(full) for full in fulls]
    _gather_into(outs, _scatter_by_exchange(fulls, axis, group), axis)
    return [out[: v.numel()].view(v.shape) for out, v in zip(outs, values, strict=True)]


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """x[0] + x[1] + ..., in rank order; 16-bit floats are added in fp32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in _LOW else dtype
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0].to(wide) + parts[1].to(wide)
    for part in parts[2:]:
        total += part
    return total.to(dtype)


def _swap(op: str, values: Sequence[Tensor], axis: Axis) -> list[tuple[Tensor, ...]]:
    """Hand this rank's buffers in; return, for each buffer, all ranks' values of it."""
    shapes = [f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in values]
    # Copies, as a wire would make: a rank that runs on may overwrite what it has handed in
    # before the others, whose turn comes later, have read it.
    handed = [v.clone() for v in values]
    per_rank = _ranks(axis).exchange(f"{op}[{', '.join(shapes)}]", handed)
    return list(zip(*per_rank, strict=True))


def _ranks(axis: Axis) -> Any:
    axis.rank  # noqa: B018 - raises AxisError, with the fix, when no virtual ranks run here
    return current_ranks()


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend(group)


def _native(op: str) -> Any:
    """torch's tensor collective under the name it has: 2.13 renamed both and warns on the old."""
    names = {
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    }[op]
    for name in names:
        if name in vars(dist):
            return getattr(dist, name)
    raise AttributeError(f"torch.distributed has neither of {names}; fzero supports torch >= 2.11")


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
