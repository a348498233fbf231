"""The candidate lowerings of reduce-scatter, all-gather and all-reduce.

Each takes the buffers of one rank and returns what the collective must give there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns on the old names, which 2.11 alone knows.
_NEW_NAMES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_GATHER: Callable[..., Any] = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = (
    dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor
)
CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What one rank works on; made once, so that no candidate pays for fresh pages."""

    rank: int
    full: Tensor  # [r, l] this rank's summands
    shard: Tensor  # [l] this rank's slice of what is to be gathered
    scratch: Tensor  # [r, l]
    out: Tensor  # [r, l]


def _wait_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _rank_order_sum(parts: Tensor) -> Tensor:
    """parts: [r, ...] -> [...], added in rank order into the first."""
    for other in parts[1:]:
        parts[0].add_(other)
    return parts[0]


def _send_and_receive(pieces: Sequence[Tensor], parts: Tensor, rank: int) -> None:
    """parts[q] = what rank q holds for this rank, by pairwise sends."""
    world = len(parts)
    parts[rank].copy_(pieces[rank])
    operations: list[dist.P2POp] = []
    for hop in range(1, world):
        to, source = (rank + hop) % world, (rank - hop) % world
        operations.append(dist.P2POp(dist.irecv, parts[source], source))
        operations.append(dist.P2POp(dist.isend, pieces[to], to))
    _wait_all(dist.batch_isend_irecv(operations) if operations else ())


def _scatter_op(b: Buffers) -> Tensor:
    _SCATTER(b.shard, b.full.view(-1))  # gloo takes flat buffers only
    return b.shard


def _scatter_exchange(b: Buffers) -> Tensor:
    dist.all_to_all_single(b.scratch, b.full)
    return _rank_order_sum(b.scratch)


def _scatter_exchange_torch_sum(b: Buffers) -> Tensor:
    dist.all_to_all_single(b.scratch, b.full)
    return torch.sum(b.scratch, dim=0, out=b.shard)


def _scatter_exchange_list(b: Buffers) -> Tensor:
    dist.all_to_all(list(b.scratch), list(b.full))
    return _rank_order_sum(b.scratch)


def _scatter_sends(b: Buffers) -> Tensor:
    _send_and_receive(list(b.full), b.scratch, b.rank)
    return _rank_order_sum(b.scratch)


def _scatter_reduces(b: Buffers) -> Tensor:
    b.scratch.copy_(b.full)  # `reduce` may leave partial sums in the buffers of the other ranks
    _wait_all([dist.reduce(row, dst=r, async_op=True) for r, row in enumerate(b.scratch)])
    return b.scratch[b.rank]


def _scatter_all_reduce(b: Buffers) -> Tensor:
    return _reduce_op(b)[b.rank]


def _gather_op(b: Buffers) -> Tensor:
    _GATHER(b.out.view(-1), b.shard)
    return b.out


def _gather_list(b: Buffers) -> Tensor:
    dist.all_gather(list(b.out), b.shard)
    return b.out


def _gather_broadcasts(b: Buffers) -> Tensor:
    b.out[b.rank].copy_(b.shard)
    _wait_all([dist.broadcast(row, src=r, async_op=True) for r, row in enumerate(b.out)])
    return b.out


def _gather_broadcasts_in_turn(b: Buffers) -> Tensor:
    b.out[b.rank].copy_(b.shard)
    for r, row in enumerate(b.out):
        dist.broadcast(row, src=r)
    return b.out


def _gather_exchange(b: Buffers) -> Tensor:
    b.scratch.copy_(b.shard)  # a copy for each rank
    dist.all_to_all_single(b.out, b.scratch)
    return b.out


def _gather_sends(b: Buffers) -> Tensor:
    _send_and_receive([b.shard] * len(b.out), b.out, b.rank)
    return b.out


def _reduce_op(b: Buffers) -> Tensor:
    b.scratch.copy_(b.full)
    dist.all_reduce(b.scratch)
    return b.scratch


def _reduce_chunks(b: Buffers) -> Tensor:
    b.scratch.copy_(b.full)
    chunks = b.scratch.view(CHUNKS, -1)
    _wait_all([dist.all_reduce(chunk, async_op=True) for chunk in chunks])
    return b.scratch


def _reduce_exchange_broadcasts(b: Buffers) -> Tensor:
    dist.all_to_all_single(b.scratch, b.full)
    b.shard.copy_(_rank_order_sum(b.scratch))
    return _gather_broadcasts(b)


def _reduce_exchange_gather(b: Buffers) -> Tensor:
    dist.all_to_all_single(b.scratch, b.full)
    b.shard.copy_(_rank_order_sum(b.scratch))
    return _gather_op(b)


FAMILIES: dict[str, dict[str, Callable[[Buffers], Tensor]]] = {
    "reduce_scatter": {
        "reduce_scatter op": _scatter_op,
        "all_to_all_single + rank-order sum": _scatter_exchange,
        "all_to_all_single + torch.sum": _scatter_exchange_torch_sum,
        "all_to_all list + rank-order sum": _scatter_exchange_list,
        "isend/irecv + rank-order sum": _scatter_sends,
        "W async reduce": _scatter_reduces,
        "all_reduce + slice": _scatter_all_reduce,
    },
    "all_gather": {
        "all_gather op": _gather_op,
        "all_gather list": _gather_list,
        "W async broadcasts": _gather_broadcasts,
        "W broadcasts in turn": _gather_broadcasts_in_turn,
        "all_to_all_single of W copies": _gather_exchange,
        "isend/irecv": _gather_sends,
    },
    "all_reduce": {
        "all_reduce op": _reduce_op,
        f"{CHUNKS} async all_reduce": _reduce_chunks,
        "all_to_all_single + sum + W async broadcasts": _reduce_exchange_broadcasts,
        "all_to_all_single + sum + all_gather op": _reduce_exchange_gather,
    },
}
