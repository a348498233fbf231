"""How a collective runs: on virtual ranks, on gloo, on nccl. The only calls of torch.distributed.

Every function takes a list of buffers and starts all of them before it waits for the first, for
a collective costs its latency whatever its size. `begin_*` stops there and returns what is
`Started`; the function without that word waits for it. None of them knows about autograd.

The choices for gloo are measured (`benchmarks/collectives.py`): its reduce_scatter moves the
bytes of an all_reduce, so an all_to_all with a local sum in rank order is used (which is
deterministic, and can add 16-bit floats in fp32); its all_gather is slower than one broadcast
from each rank. A group may have a backend for each kind of device; the tensors decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.collectives._log import note
from fzero.errors import AxisError, explain
from fzero.mesh import Axis, Runtime
from fzero.state.buffers import SIXTEEN_BIT
from fzero.virtual import current_ranks, require_no_trace


class Started(NamedTuple):
    """A collective under way: its works, and what is left to do on this rank once they are over."""

    op: str
    axis: Axis
    works: Sequence[Any]
    finish: Callable[[], list[Tensor]]
    held: Sequence[Tensor] = ()  # what the works read, which must live as long as they do

    def wait(self) -> list[Tensor]:
        """Wait for the works, then finish; once only, for finishing may communicate again."""
        self.join()
        return self.finish()

    def join(self) -> None:
        """Wait for the works: what they read may go."""
        _wait(self.works, self.op, self.axis)


def all_gather(shards: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Each [l, *t] -> [r l, *t], the ranks' shards in rank order."""
    return begin_all_gather(shards, axis).wait()


def reduce_scatter(fulls: Sequence[Tensor], axis: Axis, *, ordered: bool) -> list[Tensor]:
    """Each [r l, *t] -> [l, *t]: this rank's rows of the sum over ranks."""
    return begin_reduce_scatter(fulls, axis, ordered=ordered).wait()


def all_reduce(
    values: Sequence[Tensor], axis: Axis, *, ordered: bool, owned: bool = False
) -> list[Tensor]:
    """Each [*t] -> [*t]: the sum over ranks, on every rank; in place if they are `owned`."""
    return begin_all_reduce(values, axis, ordered=ordered, owned=owned).wait()


def gather_in_place(fulls: Sequence[Tensor], axis: Axis) -> None:
    """Each [r l]: rows of rank r are right on rank r only; make them right on every rank."""
    begin_gather_in_place(fulls, axis).wait()


def begin_all_gather(shards: Sequence[Tensor], axis: Axis) -> Started:
    """Start `all_gather`."""
    shards = [shard.contiguous() for shard in shards]
    if axis.runtime is Runtime.VIRTUAL:
        outs = [torch.cat(per_rank) for per_rank in _swap("all_gather", shards, axis)]
        started = given(outs, axis)
    else:
        outs = [shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        started = _begin_gather_into(outs, shards, axis)
    for out in outs:
        note("all_gather", axis, out.numel(), out.dtype)
    return started


def begin_reduce_scatter(fulls: Sequence[Tensor], axis: Axis, *, ordered: bool) -> Started:
    """Start `reduce_scatter`."""
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
        sums = [
            _sum_in_order([x[row] for x in xs]) for xs, row in zip(per_buffer, rows, strict=True)
        ]
        return given(sums, axis)
    group = axis.group()
    if ordered or any(_is_gloo(group, full.device) for full in fulls):
        return _begin_scatter_by_exchange(fulls, axis, "reduce_scatter")
    outs = [full.new_empty(full.shape[0] // axis.size, *full.shape[1:]) for full in fulls]
    works = _in_one_go("reduce_scatter", list(zip(outs, fulls, strict=True)), group)
    return Started("reduce_scatter", axis, works, lambda: outs, fulls)


def begin_all_reduce(
    values: Sequence[Tensor], axis: Axis, *, ordered: bool, owned: bool = False
) -> Started:
    """Start `all_reduce`. Summed by exchange, its gather is communicated when it is waited for."""
    for value in values:
        note("all_reduce", axis, value.numel(), value.dtype)
    if axis.runtime is Runtime.VIRTUAL:
        return given([_sum_in_order(xs) for xs in _swap("all_reduce", values, axis)], axis)
    group = axis.group()
    if ordered or any(v.dtype in SIXTEEN_BIT and _is_gloo(group, v.device) for v in values):
        return _begin_reduce_by_exchange(values, axis)
    outs = list(values)
    if not owned:
        outs = [value.clone(memory_format=torch.contiguous_format) for value in values]
    works = [dist.all_reduce(out, group=group, async_op=True) for out in outs]
    return Started("all_reduce", axis, works, lambda: outs)


def begin_gather_in_place(fulls: Sequence[Tensor], axis: Axis) -> Started:
    """Start `gather_in_place`; what it gives are the `fulls`."""
    for full in fulls:
        note("all_gather", axis, full.numel(), full.dtype)
    shards = [full.chunk(axis.size)[axis.rank] for full in fulls]
    if axis.runtime is Runtime.VIRTUAL:
        for full, per_rank in zip(fulls, _swap("all_gather", shards, axis), strict=True):
            full.copy_(torch.cat(per_rank))
        return given(fulls, axis)
    return _begin_gather_into(fulls, shards, axis)


def given(outs: Sequence[Tensor], axis: Axis) -> Started:
    """What is there already, as if it had been started."""
    return Started("nothing", axis, (), lambda: list(outs))


def broadcast(values: Sequence[Tensor], axis: Axis, source: int) -> list[Tensor]:
    """Each [*t] -> [*t]: the values of one rank of the axis, on every rank."""
    for value in values:
        note("broadcast", axis, value.numel(), value.dtype)
    if axis.runtime is Runtime.VIRTUAL:
        # A copy for each rank: ranks may write into what they hold.
        return [per_rank[source].clone() for per_rank in _swap("broadcast", values, axis)]
    group = axis.group()
    outs = [value.contiguous().clone() for value in values]
    root = dist.get_global_rank(group, source)
    works = [dist.broadcast(_bytes(out), root, group=group, async_op=True) for out in outs]
    _wait(works, "broadcast", axis)
    return outs


def begin_exchange(codes: Sequence[int], axis: Axis, *, width: int) -> Started:
    """Start to give [r, width]: every rank's `codes`, at most `width`, filled up with zeros.

    `axis` is one of fzero's own, over gloo: so no rank waits for its GPU.
    """
    note("agree", axis, width * axis.size, torch.int64)
    filled = [*codes, *(0 for _ in range(width - len(codes)))]
    if axis.runtime is Runtime.VIRTUAL:
        everyone = _ranks(axis).exchange(f"agree {width} {axis.group_name}", filled)
        return given([torch.tensor(everyone)], axis)
    group = axis.group()
    mine = torch.tensor(filled, dtype=torch.int64)
    out = torch.empty(axis.size * width, dtype=torch.int64)
    with _explained("agree", axis):
        work = _native("all_gather")(out, mine, group=group, async_op=True)
    return Started("agree", axis, [work], lambda: [out.view(axis.size, width)], [mine])


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable `value` in rank order."""
    if axis.runtime is Runtime.LOCAL:
        return [value]
    if axis.runtime is Runtime.VIRTUAL:
        return _ranks(axis).exchange("gather_objects", value)
    out: list[Any] = [None] * axis.size
    with _explained("gather_objects", axis):
        dist.all_gather_object(out, value, group=axis.group())
    return out


def _begin_gather_into(outs: Sequence[Tensor], shards: Sequence[Tensor], axis: Axis) -> Started:
    group = axis.group()
    works, native = [], []
    for out, shard in zip(outs, shards, strict=True):
        if not out.numel():
            continue
        if not _is_gloo(group, out.device):
            native.append((out, shard))
            continue
        for rank, rows in enumerate(out.chunk(axis.size)):
            if rank == axis.rank and rows.data_ptr() != shard.data_ptr():
                rows.copy_(shard)
            source = dist.get_global_rank(group, rank)
            works.append(dist.broadcast(_bytes(rows), source, group=group, async_op=True))
    if native:
        works += _in_one_go("all_gather", native, group)
    return Started("all_gather", axis, works, lambda: list(outs), shards)


def _bytes(x: Tensor) -> Tensor:
    """The memory of contiguous `x`: what is only copied may have a dtype no backend knows."""
    return x.view(-1).view(torch.uint8)


def _begin_scatter_by_exchange(fulls: Sequence[Tensor], axis: Axis, op: str) -> Started:
    """Every rank sends each other rank its rows, and adds up what it gets, in rank order.

    On gloo by single sends: an all_to_all would also copy a rank's own rows to itself, which takes
    more memory and is no faster. On nccl by an all_to_all, which is one launch.
    """
    group, rank = axis.group(), axis.rank
    if not all(_is_gloo(group, full.device) for full in fulls):
        return _begin_scatter_by_all_to_all(fulls, axis, op)
    peers = [dist.get_global_rank(group, r) for r in range(axis.size)]
    rows = [list(full.chunk(axis.size)) if full.numel() else [full] * axis.size for full in fulls]
    works, parts = [], []
    for own in rows:
        got = [x if r == rank else torch.empty_like(x) for r, x in enumerate(own)]
        parts.append(got)
        with _explained(op, axis):  # after a timeout it raises where it starts
            for r in range(axis.size) if own[0].numel() else ():
                if r != rank:
                    works.append(dist.isend(_bytes(own[r]), peers[r], group=group))
                    works.append(dist.irecv(_bytes(got[r]), peers[r], group=group))

    def finish() -> list[Tensor]:
        return [_sum_in_order(some) for some in parts]

    return Started(op, axis, works, finish, fulls)


def _begin_scatter_by_all_to_all(fulls: Sequence[Tensor], axis: Axis, op: str) -> Started:
    received = [torch.empty_like(full) for full in fulls]
    works = [
        dist.all_to_all_single(got, full, group=axis.group(), async_op=True)
        for got, full in zip(received, fulls, strict=True)
        if full.numel()
    ]

    def finish() -> list[Tensor]:
        return [_sum_in_order(got.chunk(axis.size)) if got.numel() else got for got in received]

    return Started(op, axis, works, finish, fulls)


def _begin_reduce_by_exchange(values: Sequence[Tensor], axis: Axis) -> Started:
    """All-reduce as a scatter and a gather, so that each element is summed in rank order."""
    fulls = []
    for value in values:
        flat = value.reshape(-1)
        fulls.append(torch.nn.functional.pad(flat, (0, -flat.numel() % axis.size)))
    first = _begin_scatter_by_exchange(fulls, axis, "all_reduce")

    def finish() -> list[Tensor]:
        outs = [torch.empty_like(full) for full in fulls]
        second = _begin_gather_into(outs, first.finish(), axis)
        second._replace(op="all_reduce").wait()
        return [out[: v.numel()].view(v.shape) for out, v in zip(outs, values, strict=True)]

    return first._replace(finish=finish)


def _in_one_go(
    op: str, pairs: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup
) -> list[Any]:
    """Start one of torch's tensor collectives for all (output, input), as one launch."""
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for out, x in pairs:
            _native(op)(out, x, group=group)
    return manager.works


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """x[0] + x[1] + ..., in rank order; 16-bit floats are added in fp32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0].to(wide) + parts[1].to(wide)
    for part in parts[2:]:
        total += part
    return total.to(dtype)


def _swap(op: str, values: Sequence[Tensor], axis: Axis) -> list[tuple[Tensor, ...]]:
    """Hand this rank's buffers in; return, for each buffer, all ranks' values of it."""
    require_no_trace(op)
    shapes = [f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in values]
    # Copies, as a wire would make: a rank that runs on may overwrite what it has handed in
    # before the others, whose turn comes later, have read it.
    handed = [v.clone() for v in values]
    per_rank = _ranks(axis).exchange(f"{axis.group_name} {op}[{', '.join(shapes)}]".strip(), handed)
    return list(zip(*per_rank, strict=True))


def _ranks(axis: Axis) -> Any:
    axis.rank  # noqa: B018 - raises AxisError, with the fix, when no virtual ranks run here
    return current_ranks()


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return _backend_of(group, device) == "gloo"


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves tensors on `device`, or "": "cpu:gloo,cuda:nccl" has two."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return next((name for kind, _, name in pairs if kind == device.type), "")


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


def _wait(works: Sequence[Any], op: str, axis: Axis) -> None:
    with _explained(op, axis):
        for work in works:
            work.wait()


@contextmanager
def _explained(op: str, axis: Axis) -> Iterator[None]:
    """What a backend raises while it is waited for, as an `AxisError` that says whose fault."""
    try:
        yield
    except RuntimeError as error:
        raise AxisError(
            explain(
                f"{op} on rank {axis.rank} of {axis} failed: {error}",
                cause="another rank ended or raised, or did not come within the timeout.",
                fix="see the first error among the ranks' outputs; FZERO_TIMEOUT_S sets how long "
                "a group that fzero starts waits.",
            )
        ) from error
