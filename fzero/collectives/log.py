"""Counting: which collectives ran, and how many bytes each rank sent for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import cycle

import torch
import torch.distributed as dist

from fzero.collectives import liveness
from fzero.context.current_rank import current_ranks, is_abstract
from fzero.ranks.mesh import Axis, Runtime

_LOGS: list[CollectiveLog] = []
"""Open logs: of the process, for a backward runs in a thread of autograd's own on a GPU."""


_ABOUT: ContextVar[Iterator[tuple[str, ...]]] = ContextVar("about")
"""The parameters that the buffers of a collective are about, while it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEvent:
    """One buffer that went through one collective, seen from one rank."""

    op: str  # all_gather, reduce_scatter, all_reduce, all_to_all, ppermute, pmax, broadcast, agree
    axis: str  # its name: of one axis of a mesh its own, or "dp" for all ranks
    rank: int  # of the virtual rank or the process, whatever axis of the world it is over
    numel: int  # of the full buffer: the gathered result, or what was reduced
    dtype: torch.dtype
    wire_bytes: int  # that this rank sends, on the ring lower bound
    paths: tuple[str, ...] = ()  # of the parameters that it is about; none for the user's own


@dataclass(slots=True)
class CollectiveLog:
    """What `count_collectives` saw, in order, for every rank of this process.

    `wire_bytes` follows the ring bound: a gather, scatter or all-to-all of P bytes over W ranks
    sends P (W - 1) / W from each rank, an all-reduce (and pmax, pmin) twice that. A ppermute, and
    an all-to-all of sizes by rank, send what goes to another rank.
    """

    events: list[CollectiveEvent] = field(default_factory=list[CollectiveEvent])
    calls: list[str] = field(default_factory=list[str], repr=False)  # of an abstract rank, in order

    def counts(self, rank: int | None = None, *, axis: str | None = None) -> dict[str, int]:
        """Return {op: how many} for `rank` (default: the lowest rank seen); over one `axis`."""
        return dict(Counter(event.op for event in self.of(rank, axis=axis)))

    def wire_bytes(
        self, rank: int | None = None, *, ops: tuple[str, ...] = (), axis: str | None = None
    ) -> int:
        """Return the bytes that `rank` sent, over all ops or only `ops`; over one `axis`."""
        return sum(e.wire_bytes for e in self.of(rank, axis=axis) if not ops or e.op in ops)

    def of(self, rank: int | None = None, *, axis: str | None = None) -> list[CollectiveEvent]:
        """Return the events of one rank (default: the lowest seen); those over one `axis`."""
        if rank is None:
            rank = min((event.rank for event in self.events), default=0)
        mine = (event for event in self.events if event.rank == rank)
        return [event for event in mine if axis in (None, event.axis)]

    def __str__(self) -> str:
        """Return a table: a line for each op, axis and dtype of the lowest rank, and a total.

        Below it are the ranks that did the same, and those that did something else.
        """
        if not self.events:
            return "no collectives"
        of_rank = {rank: self._rows(rank) for rank in sorted({e.rank for e in self.events})}
        first, *others = of_rank
        every = self.of(first)
        total = ("total", "", "", len(every), "", sum(event.wire_bytes for event in every))
        head = ("op", "axis", "dtype", "buffers", "elements", "bytes sent")
        lines = _aligned([head, *of_rank[first], total])
        same = [rank for rank in others if of_rank[rank] == of_rank[first]]
        differ = [rank for rank in others if rank not in same]
        lines.append(
            f"rank {first}" + _ranks(", and the same on", same) + _ranks("; not so on", differ)
        )
        return "\n".join(lines)

    def _rows(self, rank: int) -> list[tuple[str | int, ...]]:
        kinds: dict[tuple[str, str, str], list[CollectiveEvent]] = {}
        for event in self.of(rank):
            kind = event.op, event.axis, str(event.dtype).removeprefix("torch.")
            kinds.setdefault(kind, []).append(event)
        return [
            (*kind, len(events), sum(e.numel for e in events), sum(e.wire_bytes for e in events))
            for kind, events in kinds.items()
        ]


def _aligned(rows: list[tuple[str | int, ...]]) -> list[str]:
    """Return the lines of a table: words to the left, numbers to the right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in texts
    ]


def _ranks(what: str, ranks: list[int]) -> str:
    return f"{what} rank {', '.join(map(str, ranks))}" if ranks else ""


@contextmanager
def count_collectives() -> Generator[CollectiveLog]:
    """Collect every fzero collective issued inside the `with` block.

    Example:
        >>> import torch, fzero
        >>> def mean(x):
        ...     return fzero.pmean(x)
        >>> with count_collectives() as log:
        ...     out = fzero.simulate(mean, world_size=2)(torch.tensor([1.0, 3.0]))
        >>> out, log.counts()
        (tensor([2., 2.]), {'all_reduce': 1})
        >>> print(log)
        op          axis  dtype    buffers  elements  bytes sent
        all_reduce  dp    float32        1         1           4
        total                            1                     4
        rank 0, and the same on rank 1
    """
    log, logs = CollectiveLog(), _open_logs()
    logs.append(log)
    try:
        yield log
    finally:
        logs[:] = [other for other in logs if other is not log]


def _open_logs() -> list[CollectiveLog]:
    """The open logs that count what this thread issues; none on an abstract rank."""
    here = current_ranks()
    if here is None or here.stands_for is None:
        return _LOGS
    return here.kept.setdefault(CollectiveLog, [])


@contextmanager
def about(paths: Callable[[], Iterable[tuple[str, ...]]]) -> Generator[None]:
    """Say in open logs which parameters the buffers of the collective in this block are about.

    `paths` gives those of each buffer that is not empty, in order; again for a second collective.
    """
    if not _open_logs():
        yield
        return
    token = _ABOUT.set(cycle(paths()))
    try:
        yield
    finally:
        _ABOUT.reset(token)


def note_call(text: str) -> None:
    """Tell the logs of an abstract rank of a call that ranks compare, with its options in lines."""
    if is_abstract():
        for log in _open_logs():
            log.calls.append(text)


def note(
    op: str,
    axis: Axis,
    numel: int,
    dtype: torch.dtype,
    said: str = "",
    *,
    sends: int | None = None,
) -> None:
    """Tell every open log about one buffer; `numel` is that of the full (not sharded) side.

    sends: the elements that this rank sends, where ranks do not send equal parts.
    """
    over_processes = axis.runtime is Runtime.PROCESSES
    liveness.count_call(real=over_processes)
    logs = _open_logs()
    if not logs or (not numel and sends is None):  # of no elements none are sent
        return
    one_way = numel * dtype.itemsize * (axis.size - 1) // axis.size
    wire_bytes = 2 * one_way if op in ("all_reduce", "pmax", "pmin") else one_way
    if sends is not None:
        wire_bytes = sends * dtype.itemsize
    here = current_ranks()
    event = CollectiveEvent(
        op=op,
        axis=axis.name,
        rank=here.rank if here else dist.get_rank() if over_processes else 0,
        numel=numel,
        dtype=dtype,
        wire_bytes=wire_bytes,
        paths=() if op == "agree" else next(_ABOUT.get(iter(())), ()),
    )
    for log in logs:
        log.events.append(event)
    if said:
        note_call(said)
