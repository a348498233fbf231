"""Counting: which collectives ran, and how many bytes each rank sent for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

import torch

from fzero.collectives import _alive
from fzero.mesh import Axis
from fzero.virtual import current_ranks, is_abstract

_LOGS: list[CollectiveLog] = []
"""Open logs: of the process, for a backward runs in a thread of autograd's own on a GPU."""


class _About(threading.local):
    """The parameters that the buffers of a collective are about, while it begins."""

    paths: Iterator[tuple[str, ...]] = iter(())


_ABOUT = _About()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEvent:
    """One buffer that went through one collective, seen from one rank."""

    op: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, agree
    axis: str  # its name: of a mesh of two dims, that of the dim, or "dp" for all ranks
    rank: int  # among all ranks of the mesh
    numel: int  # of the full buffer: the gathered result, or what was reduced
    dtype: torch.dtype
    wire_bytes: int  # that this rank sends, on the ring lower bound
    paths: tuple[str, ...] = ()  # of the parameters that it is about; none for the user's own
    said: str = ""  # of "agree": the call or the pass that the rank announces


@dataclass(slots=True)
class CollectiveLog:
    """What `count_collectives` saw, in order, for every rank of this process.

    `wire_bytes` follows the ring bound: a gather, scatter or all-to-all of P bytes over W ranks
    sends P (W - 1) / W from each rank, an all-reduce twice that.
    """

    events: list[CollectiveEvent] = field(default_factory=list)

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


@contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Collect every fzero collective issued inside the `with` block.

    Example:
        >>> import torch, fzero
        >>> def mean(x):
        ...     return fzero.pmean(x)
        >>> with count_collectives() as log:
        ...     out = fzero.simulate(mean, world_size=2)(torch.tensor([1.0, 3.0]))
        >>> out, log.counts()
        (tensor([2., 2.]), {'all_reduce': 1})
    """
    log, logs = CollectiveLog(), _open_logs()
    logs.append(log)
    try:
        yield log
    finally:
        logs[:] = [other for other in logs if other is not log]


def _open_logs() -> list[CollectiveLog]:
    """Those that see what is issued here. What an abstract rank does is issued nowhere."""
    here = current_ranks()
    if here is None or not is_abstract():
        return _LOGS
    return here.kept.setdefault(CollectiveLog, [])


@contextmanager
def about(paths: Callable[[], Iterable[tuple[str, ...]]]) -> Iterator[None]:
    """Say in open logs which parameters the buffers of the collective in this block are about.

    `paths` gives those of each buffer that is not empty, in order; again for a second collective.
    """
    if not _open_logs():
        yield
        return
    _ABOUT.paths = cycle(paths())
    try:
        yield
    finally:
        _ABOUT.paths = iter(())


def note(op: str, axis: Axis, numel: int, dtype: torch.dtype, said: str = "") -> None:
    """Tell every open log about one buffer; `numel` is that of the full (not sharded) side."""
    _alive.count()
    logs = _open_logs()
    if not logs:
        return
    one_way = numel * dtype.itemsize * (axis.size - 1) // axis.size
    wire_bytes = 2 * one_way if op == "all_reduce" else one_way
    event = CollectiveEvent(
        op=op,
        axis=axis.name,
        rank=(axis.whole or axis).rank,
        numel=numel,
        dtype=dtype,
        wire_bytes=wire_bytes,
        paths=() if op == "agree" else next(_ABOUT.paths, ()),
        said=said,
    )
    for log in logs:
        log.events.append(event)
