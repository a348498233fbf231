"""A backend of c10d for tensors on "sim", over gloo, with the order that NCCL keeps.

A call enqueues on a stream of the group's own, after what the current stream has so far; `wait()`
lets the current stream wait for it, and not the host. Until then the work holds its tensors.
Results are those of one order of ranks, on all ranks the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

SUMS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _host(x: Tensor) -> Tensor:
    """[n] bytes of the host: the memory of a tensor on the device."""
    from tests.device.sim import load

    if not x.is_contiguous():
        raise ValueError(f"simccl: Tensors must be contiguous, and one is {list(x.stride())}")
    return load().host(x.detach()).view(-1).view(torch.uint8)


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [x for some in lists for x in some]


class Work:
    """A collective under way: gloo's works, and what to do on the host when they are over."""

    def __init__(self, tensors: Sequence[Tensor], comm: torch.Stream) -> None:
        self.outputs, self._held, self._comm = [], list(tensors), comm
        self.works: list[Any] = []
        self.under_way: set[Work] = set()  # of the backend, which lets go of what was waited for
        self.finish: list[Callable[[], Any]] = []
        self.end: Any = None
        self._completing = threading.Lock()

    def wait(self) -> None:
        """Let the current stream wait. (gloo has the host wait, too; nobody is told.)"""
        self.complete()
        torch.accelerator.current_stream(self._comm.device).wait_event(self.end)
        self._held.clear()
        self.under_way.discard(self)

    def complete(self) -> None:
        """Have the numbers be there, whichever thread is the first to ask for them."""
        with self._completing:
            for work in self.works:  # one that failed raises for each that waits
                work.wait()
            self.works.clear()
            for finish in self.finish:
                finish()
            self.finish.clear()

    def is_completed(self) -> bool:
        """Return whether it is over, which the host then knows."""
        return all(work.is_completed() for work in self.works) and self._over()

    def _over(self) -> bool:
        self.complete()
        return self.end.query()

    def let_go(self) -> None:
        """Of a work that nobody waits for: NCCL's watchdog frees its tensors when it is over."""
        self.complete()
        for x in self._held:
            x.record_stream(self._comm)
        self._held.clear()


class Backend:
    """What `sim::PyBackend` calls."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size
        self._streams: dict[torch.device, torch.Stream] = {}
        self._under_way: set[Work] = set()
        self._batch: list[Work] | None = None

    def _start(
        self, op: str, ins: Sequence[Tensor], outs: Sequence[Tensor], pairs: Any, exchange: Any
    ) -> Work:
        """Start `exchange(work, *pair)` for each pair, as one launch."""
        from tests.device.sim import load

        device = (*ins, *outs)[0].device
        if any(x.device != device for x in (*ins, *outs)):
            raise ValueError(f"simccl: {op} of tensors on several devices")
        comm = self._streams.setdefault(device, torch.Stream(device))
        comm.wait_stream(torch.accelerator.current_stream(device))
        with comm:  # and the current device is the same afterwards
            load().ran(f"c10d::{op}", list(ins), list(outs))
        work = Work([*ins, *outs], comm)
        work.outputs = list(outs)
        for pair in pairs:
            exchange(work, *pair)
        work.end = comm.record_event()
        for old in [w for w in [*self._under_way] if all(x.is_completed() for x in w.works)]:
            old.let_go()
            self._under_way.discard(old)
        work.under_way = self._under_way
        self._under_way.add(work)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _all(self, work: Work, x: Tensor, finish: Callable[[list[Tensor]], Any]) -> None:
        """Give `finish` the bytes that each rank has in x."""
        own = _host(x).clone()  # a thread of gloo lets go of it a moment late
        got = [torch.empty_like(own) for _ in range(self._size)]
        if own.numel():
            work.works.append(self._gloo.allgather([got], [own], c10d.AllgatherOptions()))
        work.finish.append(lambda: finish(got))

    def _each(self, work: Work, parts: Sequence[Tensor], got: Sequence[Tensor]) -> None:
        """Give rank r parts[r], and take from it got[r]."""
        sent = torch.cat([_host(part) for part in parts])
        into = [_host(one) for one in got]
        sizes, out = (
            [one.numel() for one in into],
            torch.empty(sum(map(len, into)), dtype=torch.uint8),
        )
        split = [part.numel() * part.element_size() for part in parts]
        options = c10d.AllToAllOptions()
        work.works.append(self._gloo.alltoall_base(out, sent, sizes, split, options))
        work.finish.append(
            lambda: [a.copy_(b) for a, b in zip(into, out.split(sizes), strict=True)]
        )

    def _reduced(self, parts: Sequence[Tensor], like: Tensor, op: Any) -> None:
        total = reduce(SUMS[getattr(op, "op", op)], [part.view(like.dtype) for part in parts])
        if op == dist.ReduceOp.AVG:
            total = total / self._size
        _host(like).copy_(total.view(torch.uint8))

    def start_coalescing(self) -> None:
        self._batch = []

    def end_coalescing(self) -> Work:
        batch, self._batch = self._batch or [], None
        device = torch.device("sim", torch.accelerator.current_device_index())
        whole = Work([], batch[-1]._comm if batch else torch.accelerator.current_stream(device))
        for work in batch:
            whole.outputs += work.outputs
            whole.finish.append(work.complete)
            whole._held += work._held
        whole.end = whole._comm.record_event()
        return whole

    def shutdown(self) -> None:
        self._under_way.clear()

    def broadcast(self, xs: Sequence[Tensor], options: Any) -> Work:
        def exchange(work: Work, x: Tensor) -> None:
            if x.numel():
                work.works.append(self._gloo.broadcast([_host(x)], options))

        return self._start("broadcast", [], xs, [(x,) for x in xs], exchange)

    def allreduce(self, xs: Sequence[Tensor], options: Any) -> Work:
        def exchange(work: Work, x: Tensor) -> None:
            self._all(work, x, lambda got: self._reduced(got, x, options.reduceOp))

        return self._start("allreduce", [], xs, [(x,) for x in xs], exchange)

    def reduce(self, xs: Sequence[Tensor], options: Any) -> Work:
        def exchange(work: Work, x: Tensor) -> None:
            here = options.rootRank == self._rank
            self._all(work, x, lambda got: here and self._reduced(got, x, options.reduceOp))

        return self._start("reduce", [], xs, [(x,) for x in xs], exchange)

    def gather_single(self, outs: Sequence[Tensor], ins: Sequence[Tensor], options: Any) -> Work:
        def exchange(work: Work, x: Tensor, out: Tensor) -> None:
            self._all(work, x, lambda got: _host(out).copy_(torch.cat(got)))

        return self._start("all_gather", ins, outs, zip(ins, outs, strict=True), exchange)

    def allgather(self, outs: Any, ins: Sequence[Tensor], options: Any) -> Work:
        def exchange(work: Work, x: Tensor, into: Sequence[Tensor]) -> None:
            self._all(
                work, x, lambda got: [_host(a).copy_(b) for a, b in zip(into, got, strict=True)]
            )

        return self._start("all_gather", ins, _flat(outs), zip(ins, outs, strict=True), exchange)

    def gather(self, outs: Any, ins: Sequence[Tensor], options: Any) -> Work:
        def exchange(work: Work, x: Tensor) -> None:
            into = _flat(outs)  # empty but on the root
            self._all(work, x, lambda got: [_host(a).copy_(b) for a, b in zip(into, got)])  # noqa: B905

        return self._start("gather", ins, _flat(outs), [(x,) for x in ins], exchange)

    def scatter(self, outs: Sequence[Tensor], ins: Any, options: Any) -> Work:
        def exchange(work: Work, out: Tensor) -> None:
            nothing = out.new_empty(0)
            parts = _flat(ins) or [nothing] * self._size
            got = [out if r == options.rootRank else nothing for r in range(self._size)]
            self._each(work, parts, got)

        return self._start("scatter", _flat(ins), outs, [(out,) for out in outs], exchange)

    def _scatter(self, outs: Sequence[Tensor], parts: Any, ins: Any, options: Any) -> Work:
        def exchange(work: Work, out: Tensor, own: Sequence[Tensor]) -> None:
            from tests.device.sim import load

            got = [torch.empty(out.shape, dtype=out.dtype) for _ in own]
            self._each(work, [load().host(x) for x in own], got)
            work.finish.append(
                lambda: self._reduced([g.view(-1) for g in got], out, options.reduceOp)
            )

        return self._start("reduce_scatter", ins, outs, zip(outs, parts, strict=True), exchange)

    def scatter_single(self, outs: Sequence[Tensor], ins: Sequence[Tensor], options: Any) -> Work:
        return self._scatter(outs, [x.view(-1).chunk(self._size) for x in ins], ins, options)

    def reduce_scatter(self, outs: Sequence[Tensor], ins: Any, options: Any) -> Work:
        return self._scatter(outs, ins, _flat(ins), options)

    def alltoall_base(self, out: Tensor, x: Tensor, into: Any, outof: Any, options: Any) -> Work:
        def exchange(work: Work) -> None:
            parts = x.split(outof) if outof else x.chunk(self._size)
            self._each(work, parts, out.split(into) if into else out.chunk(self._size))

        return self._start("all_to_all", [x], [out], [()], exchange)

    def alltoall(self, outs: Sequence[Tensor], ins: Sequence[Tensor], options: Any) -> Work:
        return self._start("all_to_all", ins, outs, [(ins, outs)], self._each)

    def send(self, xs: Sequence[Tensor], to: int, tag: int) -> Work:
        def exchange(work: Work, x: Tensor) -> None:
            if x.numel():
                work.works.append(self._gloo.send([_host(x).clone()], to, tag))

        return self._start("send", xs, [], [(x,) for x in xs], exchange)

    def recv(self, xs: Sequence[Tensor], source: int, tag: int) -> Work:
        def exchange(work: Work, x: Tensor) -> None:
            if x.numel():
                work.works.append(self._gloo.recv([_host(x)], source, tag))

        return self._start("recv", [], xs, [(x,) for x in xs], exchange)

    def barrier(self) -> Work:
        """Wait with the host, as NCCL's does."""
        torch.accelerator.synchronize()
        self._gloo.barrier().wait()
        device = torch.device("sim", torch.accelerator.current_device_index())
        work = Work([], torch.accelerator.current_stream(device))
        work.end = work._comm.record_event()
        return work


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make the backend of a group, as c10d asks for it."""
    from tests.device.sim import load

    return load().backend(rank, size, Backend(store, rank, size, timeout))
