"""An all-to-all in which each rank may send each other rank another number of elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.collectives._backend import PARTLY_TYPED, Started, explained, given, is_gloo
from fzero.collectives._exchange import sends_between
from fzero.collectives._log import note
from fzero.collectives._lowering import swap_parts
from fzero.collectives._start import InFlight
from fzero.context.here import is_abstract
from fzero.ranks.mesh import Axis, Runtime


@torch.no_grad()
def start_uneven_all_to_all(
    sent: Sequence[Tensor], sizes: Sequence[int], axis: Axis, *, total: int
) -> InFlight:
    """Start to send sent[r] [any] to rank r, and to get [sizes[r]] from it; what is sent stays.

    What a rank has for itself is given as it is. Every rank calls it with the same `total`, the
    elements that cross ranks in all; where that is 0, none communicates.
    """
    if axis.runtime is Runtime.LOCAL or not total:
        return InFlight(given(list(sent), axis), {})
    mine = axis.rank
    away = sum(x.numel() for r, x in enumerate(sent) if r != mine)
    note("all_to_all", axis, away, sent[mine].dtype, sends=away)
    return InFlight(_begin(list(sent), sizes, axis), {})


def exchange_beside(
    sent: Sequence[tuple[int, Tensor]], got: Sequence[tuple[int, Tensor]], axis: Axis
) -> None:
    """Send each (r, x [n] uint8) to rank r, and fill each (r, y [n]) with what r sends; wait.

    What two ranks send each other comes in the order in which it is sent. In host memory, over the
    gloo group of `axis`: for a thread that has it to itself, whose bytes are in no log.
    """
    if axis.runtime is Runtime.LOCAL:
        return
    group = axis.group()
    with explained("exchange", axis):
        works = [dist.isend(x, dist.get_global_rank(group, r), group=group) for r, x in sent]
        works += [dist.irecv(y, dist.get_global_rank(group, r), group=group) for r, y in got]
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()


def _begin(sent: list[Tensor], sizes: Sequence[int], axis: Axis) -> Started:
    mine = axis.rank
    if axis.runtime is Runtime.VIRTUAL and not is_abstract():
        return given(swap_parts("all_to_all", sent, axis), axis)
    pairs = zip(sent, sizes, strict=True)
    got = [x if r == mine else x.new_empty(size) for r, (x, size) in enumerate(pairs)]
    if is_abstract():
        return Started("all_to_all", axis, (), lambda: got, sent)
    if is_gloo(axis, sent[mine].device):
        return Started("all_to_all", axis, sends_between(sent, got, axis), lambda: got, sent)
    nothing = sent[mine].new_empty(0)
    away = [nothing if r == mine else x.contiguous() for r, x in enumerate(sent)]
    into = [nothing if r == mine else x for r, x in enumerate(got)]
    with explained("all_to_all", axis):
        work = PARTLY_TYPED.all_to_all(into, away, group=axis.group(), async_op=True)
    return Started("all_to_all", axis, [work], lambda: got, away)
