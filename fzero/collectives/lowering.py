"""How a collective runs: on virtual ranks, on gloo, on a device's backend; waited for later.

Every function takes a list of buffers and starts all of them before it waits for the first, for a
collective costs its latency whatever its size. `begin_*` and `start_*` stop there, and return what
is `InFlight`. None of them knows about autograd.

    flights = [start_scatter(fulls, axis) for fulls in buckets]    # on the wire from here on
    ...                                                            # compute something else
    shards = [flight.wait() for flight in flights]                 # in the order of the starts

Every rank must start *and wait* in the same order: what gloo and nccl match up is the order of
the calls, and a `start_reduce` that sums by exchange (`ordered`, or 16-bit floats on gloo) sends
its second half when it is waited for.

The choices for gloo are measured (`benchmarks/collectives.py`): its reduce_scatter moves the
bytes of an all_reduce, so an all_to_all with a local sum in rank order is used (which is
deterministic, and can add 16-bit floats in fp32); its all_gather is slower than one broadcast
from each rank. A group may have a backend for each kind of device; the tensors decide. Those of a
device without one go over gloo, by copies in host memory.
"""

from __future__ import annotations

import functools
import warnings
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.collectives import liveness
from fzero.collectives.log import note
from fzero.context.current_rank import (
    current_ranks,
    has_no_values,
    is_abstract,
    kind_of,
    require_no_trace,
)
from fzero.errors import AxisError, LostRankError, explain
from fzero.ranks.mesh import Axis, Runtime
from fzero.ranks.virtual import different
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.codec import Codec, WireForm, decoded, encoded


@dataclass(slots=True)
class InFlight:
    """What a started collective will give: its works, and what is left to do once they are over.

    Holds every buffer of it until `wait` has returned, and then the outputs only. On a GPU, wait on
    the stream that it was started from: the memory that is then let go belongs to that stream.

    Attributes:
        op: its name in errors.
        finish: what it gives: tensors; of an exchange the rows of all ranks.
        held: what the works read, which must live as long as they do.
        rest: {position: output} of what was never sent.
    """

    op: str
    axis: Axis
    works: Sequence[Any]
    finish: Callable[[], list[Any]]
    held: Sequence[Tensor] = ()
    rest: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    _outs: list[Any] | None = None
    _error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would find all works of it over."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[Any]:
        """Return the outputs, in the order of the inputs; again the same list if asked again.

        On a GPU the current stream waits, not the caller. Raises `AxisError`, every time, when
        another rank failed; the contents of outputs and of what was given up are then undefined.
        """
        if self._error is not None:
            raise self._error
        if self._outs is None:
            try:
                if self.works:  # virtual ranks have none, and wait often
                    with explained(self.op, self.axis):
                        for work in self.works:
                            work.wait()
                finish, self.finish = self.finish, list  # what was sent goes here
                self.works = self.held = ()
                with torch.no_grad():
                    outs = finish()
            except Exception as error:
                # Not to be tried again: its second half may be on the wire already.
                self._error = error
                raise
            for at, out in sorted(self.rest.items()):
                outs.insert(at, out)
            self._outs, self.rest = outs, {}
        return self._outs


def start_gather(
    shards: Sequence[Tensor], axis: Axis, *, codecs: Sequence[Codec | None] = ()
) -> InFlight:
    """Each [l] -> [W l], concatenated in rank order; see `gather_many`.

    codecs: what each is encoded by, if it is, and given as every rank decodes it; () for none.
    """
    begin = partial(_begin_encoded_gather, codecs=codecs) if any(codecs) else begin_all_gather
    return _start("gather", begin, shards, axis)


def _begin_encoded_gather(
    shards: Sequence[Tensor], axis: Axis, codecs: Sequence[Codec | None]
) -> InFlight:
    pairs = [*zip(codecs, shards, strict=True)]
    made = [None if codec is None else encoded(codec, x.view(1, -1)) for codec, x in pairs]
    sent = [x if one is None else one[0].reshape(-1) for x, one in zip(shards, made, strict=True)]
    started = begin_all_gather(sent, axis)

    forms = [(codec, one and one[1], x.dtype) for (codec, x), one in zip(pairs, made, strict=True)]

    def received(
        out: Tensor, codec: Codec | None, form: WireForm | None, dtype: torch.dtype
    ) -> Tensor:
        if codec is None or form is None:
            return out
        return decoded(codec, form.rows_of(out), form, dtype).reshape(-1)

    gathered = started.finish
    return replace(
        started,
        finish=lambda: [received(out, *x) for out, x in zip(gathered(), forms, strict=True)],
    )


def start_all_to_all(fulls: Sequence[Tensor], axis: Axis) -> InFlight:
    """Each [W l] -> [W l]: chunk s is what rank s has as its chunk for this rank."""
    return _start("all_to_all", begin_all_to_all, fulls, axis)


def start_permute(
    xs: Sequence[Tensor], axis: Axis, sources: Sequence[int], destinations: Sequence[int]
) -> InFlight:
    """Each [*t] -> [*t]: what the source of this rank has, or zeros."""
    begin = partial(begin_permute, sources=sources, destinations=destinations)
    return _start("permute", begin, xs, axis)


def start_extremum(xs: Sequence[Tensor], axis: Axis, op: str) -> InFlight:
    """Each [*t] -> [*t]: the largest ("pmax") or the smallest ("pmin") of all ranks'.

    See the top of this file for the order of waits: its second half is sent in the wait.
    """
    return _start("reduce", partial(begin_extremum, op=op), xs, axis)


def start_scatter(fulls: Sequence[Tensor], axis: Axis, *, ordered: bool = False) -> InFlight:
    """Each [W l] -> [l]: this rank's shard of the sum over ranks; see `scatter_many`."""
    return _start("scatter", partial(begin_reduce_scatter, ordered=ordered), fulls, axis)


def start_reduce(values: Sequence[Tensor], axis: Axis, *, ordered: bool = False) -> InFlight:
    """Each [n] -> [n]: the sum over ranks. `values` are given up: it may write into them.

    See the top of this file for the order of waits, which matters here most.
    """

    def begin(xs: Sequence[Tensor], axis: Axis) -> InFlight:
        owned = [x.contiguous() for x in xs]  # a backend cannot write into anything else
        return begin_all_reduce(owned, axis, ordered=ordered, owned=True)

    return _start("reduce", begin, values, axis)


def start_gather_in_place(fulls: Sequence[Tensor], axis: Axis) -> InFlight:
    """Each [W l], contiguous: the shard of rank r is right on rank r only; fill in those of others.

    What is given are the `fulls`; nobody may read or write them before `wait` has returned.
    """
    fulls = [full.detach() for full in fulls]
    if axis.runtime is Runtime.LOCAL:
        return given(fulls, axis)
    with torch.no_grad():
        # With the empty ones, which are counted, and not sent.
        return begin_gather_in_place(fulls, axis)


def _start(
    kind: str,
    begin: Callable[[Sequence[Tensor], Axis], InFlight],
    xs: Sequence[Tensor],
    axis: Axis,
) -> InFlight:
    xs = [x.detach() for x in xs]
    if axis.runtime is Runtime.LOCAL:
        return given(xs, axis)
    with torch.no_grad():
        wanted = [x for x in xs if x.numel()]
        started = begin(wanted, axis) if wanted else given([], axis)
        rest = {at: of_nothing(kind, axis, x) for at, x in enumerate(xs) if not x.numel()}
        return replace(started, rest=rest) if rest else started


_TORCH: Any = torch  # what it has no types for


def of_nothing(kind: str, axis: Axis, x: Tensor) -> Tensor:
    """Return what a map makes of a tensor without elements: a shape, and nothing to send."""
    if kind in ("reduce", "all_to_all", "exchange", "permute"):
        return x.clone()
    if kind == "gather":
        return x.repeat(axis.size, *(1 for _ in x.shape[1:]))
    return x[: x.shape[0] // axis.size]


# said: of a user's call, what virtual ranks compare when they exchange values.


def begin_all_gather(shards: Sequence[Tensor], axis: Axis, *, said: str = "") -> InFlight:
    """Start to give each [l, *t] -> [r l, *t], the ranks' shards in rank order."""
    shards = [shard.contiguous() for shard in shards]
    if is_abstract():
        outs = _as_op("all_gather", shards, axis)
        started = InFlight("all_gather", axis, (), lambda: outs, shards)
    elif axis.runtime is Runtime.VIRTUAL:
        outs = _swap(said or "all_gather", shards, axis, torch.cat)
        started = InFlight("all_gather", axis, (), lambda: [out.clone() for out in outs])
    else:
        outs = [shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:]) for shard in shards]
        started = begin_gather_into(outs, shards, axis)
    for out in outs:
        note("all_gather", axis, out.numel(), out.dtype)
    return started


def begin_reduce_scatter(
    fulls: Sequence[Tensor], axis: Axis, ordered: bool, *, said: str = ""
) -> InFlight:
    """Start to give each [r l, *t] -> [l, *t]: this rank's shard of the sum over ranks."""
    fulls = [full.contiguous() for full in fulls]
    for full in fulls:
        note("reduce_scatter", axis, full.numel(), full.dtype)
    if swaps(axis):
        sums = _swap(said or "reduce_scatter", fulls, axis, sum_in_order)
        return given([_own_rows(x, axis).clone() for x in sums], axis)
    if _is_op(fulls):
        return given(_as_op("reduce_scatter", fulls, axis, ordered), axis)
    if ordered or any(is_gloo(axis, full.device) for full in fulls):
        return begin_scatter_by_exchange(fulls, axis, "reduce_scatter")
    outs = [full.new_empty(full.shape[0] // axis.size, *full.shape[1:]) for full in fulls]
    works = in_one_go("reduce_scatter", list(zip(outs, fulls, strict=True)), axis)
    return InFlight("reduce_scatter", axis, works, lambda: outs, fulls)


def begin_all_to_all(fulls: Sequence[Tensor], axis: Axis, *, said: str = "") -> InFlight:
    """Start to give each [r l] -> [r l]: chunk s is what rank s has as its chunk for this rank."""
    for full in fulls:
        note("all_to_all", axis, full.numel(), full.dtype)
    if swaps(axis):
        every = _swap(said or "all_to_all", fulls, axis, torch.stack)  # [from, to l]
        size, form = axis.size, torch.contiguous_format
        mine = [torch.unflatten(x, 1, (size, x.shape[1] // size))[:, axis.rank] for x in every]
        return given([x.clone(memory_format=form).flatten(0, 1) for x in mine], axis)
    if _is_op(fulls):
        return given(_as_op("all_to_all", fulls, axis), axis)
    fulls = [full.contiguous() for full in fulls]
    works, received = _all_to_all(fulls, axis)
    return InFlight("all_to_all", axis, works, lambda: received, fulls)


def begin_uneven_all_to_all(
    xs: Sequence[Tensor],
    axis: Axis,
    sent: Sequence[int],
    received: Sequence[int],
    *,
    said: str = "",
) -> InFlight:
    """Start to give each [sum(sent), *t] -> [sum(received), *t].

    sent[r] rows go to rank r, in order; received[r] rows come from it, in rank order.
    """
    xs = [x.contiguous() for x in xs]
    for x in xs:
        width = x[0].numel() if len(x) else x.new_empty(1, *x.shape[1:], device="meta").numel()
        away = sum(sent) - sent[axis.rank]
        note("all_to_all", axis, x.numel(), x.dtype, sends=away * width)
    if swaps(axis):
        shapes = shapes_of(xs, ragged=True)
        parts = [
            swap_parts(said or "all_to_all", torch.split(x, list(sent)), axis, shapes) for x in xs
        ]
        return given([torch.cat(some) for some in parts], axis)
    if _is_op(xs):
        return given(_as_op("uneven_all_to_all", xs, axis, list(sent), list(received)), axis)
    works, outs = list[Any](), [x.new_empty(sum(received), *x.shape[1:]) for x in xs]
    for x, out in zip(xs, outs, strict=True) if not is_abstract() else ():
        own, got = torch.split(x, list(sent)), torch.split(out, list(received))
        works += exchange_chunks(own, got, axis)
        got[axis.rank].copy_(own[axis.rank])
    return InFlight("all_to_all", axis, works, lambda: outs, xs)


def begin_permute(
    xs: Sequence[Tensor],
    axis: Axis,
    sources: Sequence[int],
    destinations: Sequence[int],
    *,
    said: str = "",
) -> InFlight:
    """Start to give each [*t] -> [*t]: what the source of this rank has; zeros if it has none."""
    mine = axis.rank
    source = dict(zip(destinations, sources, strict=True)).get(mine)
    target = dict(zip(sources, destinations, strict=True)).get(mine)
    xs = [x.contiguous() for x in xs]
    for x in xs:
        away = x.numel() if target not in (None, mine) else 0
        note("ppermute", axis, x.numel(), x.dtype, sends=away if x.numel() else None)
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
    if _is_op(xs):
        return given(_as_op("ppermute", xs, axis, list(sources), list(destinations)), axis)
    works, ranks = list[Any](), range(axis.size)
    outs = [torch.zeros_like(x) if source is None else torch.empty_like(x) for x in xs]
    for x, out in zip(xs, outs, strict=True) if not is_abstract() else ():
        if source == mine:
            out.copy_(x)
        nothing = x.new_empty(0)
        own = [x if r == target else nothing for r in ranks]
        got = [out if r == source else nothing for r in ranks]
        works += exchange_chunks(own, got, axis, "ppermute")
    return InFlight("ppermute", axis, works, lambda: outs, xs)


def begin_extremum(values: Sequence[Tensor], axis: Axis, op: str) -> InFlight:
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
    ordered: bool,
    *,
    owned: bool = False,
    said: str = "",
) -> InFlight:
    """Start to give each [*t] -> [*t]: the sum over ranks, on every rank.

    It may write into values that are `owned`. Summed by exchange, its gather is communicated when
    it is waited for.
    """
    for value in values:
        note("all_reduce", axis, value.numel(), value.dtype)
    if swaps(axis):
        sums = _swap(said or "all_reduce", values, axis, sum_in_order)
        return given([x.clone() for x in sums], axis)
    if _is_op(values):
        return given(_as_op("all_reduce", values, axis, ordered), axis)
    if ordered or any(v.dtype in SIXTEEN_BIT and is_gloo(axis, v.device) for v in values):
        return begin_reduce_by_exchange(values, axis)
    outs = list(values)
    if not owned:
        outs = [value.clone(memory_format=torch.contiguous_format) for value in values]
    if is_abstract():
        return given(outs, axis)
    group = axis.group()
    works = [_begun(PARTLY_TYPED.all_reduce, group, out, async_op=True) for out in outs]
    return InFlight("all_reduce", axis, works, lambda: outs)


def begin_gather_in_place(fulls: Sequence[Tensor], axis: Axis) -> InFlight:
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
    outs = [value.contiguous().clone() for value in values]
    group = axis.group()
    root = dist.get_global_rank(group, source)
    works = [_begun(dist.broadcast, group, as_bytes(x), src=root, async_op=True) for x in outs]
    return InFlight("broadcast", axis, works, lambda: outs).wait()


def begin_exchange(
    codes: Sequence[int],
    axis: Axis,
    read: Callable[[list[list[int]]], Any],
    *,
    width: int,
    said: str = "",
) -> InFlight:
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
        return given([on_virtual_ranks("a call of fzero", filled, axis, read)], axis)
    # Of host memory, which takes a tenth of the time that torch.tensor does. A fake group sends
    # nothing: there all ranks say what this one does.
    numbers = array("q", filled * axis.size)
    mine, out = (torch.frombuffer(array("q", numbers), dtype=torch.int64) for _ in range(2))
    with explained("agree", axis):
        work = PARTLY_TYPED.all_to_all_single(out, mine, group=axis.group(), async_op=True)
    rows: Any = out.view(axis.size, width)  # tolist() has no types
    return InFlight("agree", axis, [work], lambda: [read(rows.tolist())], [mine])


def gather_objects(
    value: Any, axis: Axis, make: Callable[[list[Any]], list[Any]] = list
) -> list[Any]:
    """Return every rank's picklable `value` in rank order, or what all ranks alike `make` of it."""
    if axis.runtime is Runtime.LOCAL:
        return make([value])
    if axis.runtime is Runtime.VIRTUAL:
        return list(on_virtual_ranks("gather_objects", value, axis, make))
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

    # Under `remat` another rank would take a gradient of what it reads for lost.
    given = [value.detach() for value in values]
    return on_virtual_ranks(op, given, axis, made, shapes_of(values))


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

    return on_virtual_ranks(op, [x.detach() for x in sent], axis, made, shapes)[axis.rank]


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


def on_virtual_ranks(
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
        return [on_virtual_ranks(op, Told(said), axis, any_of, shapes)]
    return [*_of_parts(op, Told(said), axis, any_of, shapes).values()]


def any_of(everyone: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return what any rank says, bit by bit."""
    columns: list[tuple[int, ...]] = [*zip(*everyone, strict=True)]
    return tuple([reduce(int.__or__, bits) for bits in columns])


def _of_parts(
    op: str, value: Any, axis: Axis, make: Callable[[list[Any]], Any], shapes: str
) -> dict[int, Any]:
    """Return what is made for each part of the ranks, by its first rank."""
    axis.rank  # noqa: B018 - as in `on_virtual_ranks`
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


Combine = Callable[..., Tensor]
"""(the parts of all ranks, own=which of them is this rank's) -> one."""


def begin_scatter_by_exchange(
    fulls: Sequence[Tensor], axis: Axis, op: str, combine: Combine | None = None
) -> InFlight:
    """Reduce-scatter: every rank sends each other rank its shard, and adds up what it gets.

    On gloo by single sends: an all_to_all would also copy a rank's own shard to itself, which takes
    more memory and is no faster. On nccl by an all_to_all, which is one launch.
    """
    combine = combine or sum_in_order
    if not all(is_gloo(axis, full.device) for full in fulls):
        works, received = _all_to_all(fulls, axis)
        parts = [got.chunk(axis.size) if got.numel() else [got] for got in received]
        return InFlight(op, axis, works, lambda: [combine(some) for some in parts], fulls)
    works, parts = list[Any](), list[list[Tensor]]()
    for full in fulls:  # to each other rank its shard
        own = list(full.chunk(axis.size)) if full.numel() else [full] * axis.size
        got = [x if r == axis.rank else torch.empty_like(x) for r, x in enumerate(own)]
        parts.append(got)
        if full.numel() and not is_abstract():
            works += sends_between(own, got, axis, op)
    return InFlight(op, axis, works, lambda: [combine(x, axis.rank) for x in parts], fulls)


def sends_between(
    sent: Sequence[Tensor], got: Sequence[Tensor], axis: Axis, op: str = "all_to_all"
) -> list[Any]:
    """Send to, and receive from, each other rank that has something: gloo's is for equal parts."""
    group, works = axis.group(), list[Any]()
    with explained(op, axis):
        for r in (r for r in range(axis.size) if r != axis.rank):
            peer = dist.get_global_rank(group, r)
            if sent[r].numel():
                works.append(_begun(dist.isend, group, as_bytes(sent[r]), writes=False, dst=peer))
            if got[r].numel():
                works.append(_begun(dist.irecv, group, as_bytes(got[r]), src=peer))
    return works


def _all_to_all(fulls: Sequence[Tensor], axis: Axis) -> tuple[list[Any], list[Tensor]]:
    received = [torch.empty_like(full) for full in fulls]
    if is_abstract():
        return [], received
    group = axis.group()
    works = [
        _begun(PARTLY_TYPED.all_to_all_single, group, as_bytes(got), as_bytes(full), async_op=True)
        for got, full in zip(received, fulls, strict=True)
        if full.numel()
    ]
    return works, received


def begin_reduce_by_exchange(
    values: Sequence[Tensor], axis: Axis, *, op: str = "all_reduce", combine: Combine | None = None
) -> InFlight:
    """All-reduce as a scatter and a gather, so that each element is summed in rank order.

    combine: what is done to the parts of all ranks in the place of the sum.
    """
    fulls: list[Tensor] = []
    for value in values:
        flat = value.reshape(-1)
        fulls.append(torch.nn.functional.pad(flat, (0, -flat.numel() % axis.size)))
    first = begin_scatter_by_exchange(fulls, axis, op, combine)
    combined = first.finish

    def finish() -> list[Tensor]:
        outs = [torch.empty_like(full) for full in fulls]
        second = begin_gather_into(outs, combined(), axis)
        replace(second, op=op).wait()
        return [out[: v.numel()].view(v.shape) for out, v in zip(outs, values, strict=True)]

    return replace(first, finish=finish)


def begin_gather_into(outs: Sequence[Tensor], shards: Sequence[Tensor], axis: Axis) -> InFlight:
    """Gather each [l] into its [r l], which it may be a part of: on gloo one broadcast a rank."""
    if is_abstract():
        return InFlight("all_gather", axis, (), lambda: list(outs), shards)
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
            works.append(_begun(dist.broadcast, group, as_bytes(piece), src=source, async_op=True))
    if native:
        works += in_one_go("all_gather", native, axis)
    return InFlight("all_gather", axis, works, lambda: list(outs), shards)


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


@torch.no_grad()
def start_uneven_all_to_all(
    sent: Sequence[Tensor], sizes: Sequence[int], axis: Axis, *, total: int
) -> InFlight:
    """Start to send sent[r] [any] to rank r, and to get [sizes[r]] from it; what is sent stays.

    What a rank has for itself is given as it is. Every rank calls it with the same `total`, the
    elements that cross ranks in all; where that is 0, none communicates.
    """
    if axis.runtime is Runtime.LOCAL or not total:
        return given(sent, axis)
    mine = axis.rank
    away = sum(x.numel() for r, x in enumerate(sent) if r != mine)
    note("all_to_all", axis, away, sent[mine].dtype, sends=away)
    if swaps(axis):
        return given(swap_parts("all_to_all", list(sent), axis), axis)
    pairs = zip(sent, sizes, strict=True)
    got = [x if r == mine else x.new_empty(size) for r, (x, size) in enumerate(pairs)]
    works = [] if is_abstract() else exchange_chunks(sent, got, axis)
    return InFlight("all_to_all", axis, works, lambda: got, sent)


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


def exchange_chunks(
    sent: Sequence[Tensor], got: Sequence[Tensor], axis: Axis, op: str = "all_to_all"
) -> list[Any]:
    """Send sent[r] to each other rank r, and fill got[r] with what it sends; own ones stay.

    Returns the works, which read what is sent. Off gloo every rank of the group is a part of it,
    those with nothing to send or to get, too.
    """
    mine = axis.rank
    if is_gloo(axis, sent[mine].device):
        return sends_between(sent, got, axis, op)
    nothing = sent[mine].new_empty(0)
    away = [nothing if r == mine else x for r, x in enumerate(sent)]
    into = [nothing if r == mine else x for r, x in enumerate(got)]
    with explained(op, axis):
        return [PARTLY_TYPED.all_to_all(into, away, group=axis.group(), async_op=True)]


PARTLY_TYPED: Any = dist
"""torch.distributed, for its functions that are private, or whose annotations lack types."""


def given(outs: Sequence[Any], axis: Axis) -> InFlight:
    """Wrap what is finished as a started collective."""
    return InFlight("nothing", axis, (), lambda: list(outs))


ENDED = "another rank ended or raised, or did not come within the timeout."


@contextmanager
def explained(op: str, axis: Axis, *, cause: str = ENDED) -> Generator[None]:
    """Turn errors of the backend in this block into a `LostRankError` with the rank at fault."""
    try:
        yield
    except RuntimeError as error:
        found = liveness.what_became_of(ranks_of(axis))
        who = "; ".join(f"rank {rank} {what}" for rank, what in found.items())
        fault = f"{who}. So " if who else ""
        first = f"rank {next(iter(found))}'s output" if found else "the ranks' outputs"
        fix = (
            f"see the first error in {first}; FZERO_TIMEOUT_S sets how long a group that fzero "
            "starts waits."
        )
        apart = liveness.came_apart(found)
        raise LostRankError(
            f"{fault}{op} on rank {axis.rank} of {axis} failed: {error}",
            cause=liveness.ALONE if apart else cause,
            fix=liveness.APART if apart else fix,
            ranks=[*found],
            late=bool(found) and all(what.startswith(liveness.LATE) for what in found.values()),
        ) from error


def ranks_of(axis: Axis) -> tuple[int, ...]:
    """Return the processes of an axis, by their ranks in the world; () if its group is gone."""
    with suppress(AxisError):
        return tuple(dist.get_process_group_ranks(axis.group()))
    return ()


def is_gloo(axis: Axis, device: torch.device) -> bool:
    """Whether tensors on `device` go over gloo; those of an abstract rank would."""
    if is_abstract():
        return kind_of(device) == "cpu"
    group = axis.group()
    return backend_of(group, device) == "gloo" or _by_host(group, device)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that serves tensors on `device`, or "": "cpu:gloo,cuda:nccl" has two."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return next((name for kind, _, name in pairs if kind == device.type), "")


def _by_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether no backend of a group takes tensors on `device`, which copies in host memory can."""
    if device.type == "cpu":
        return False
    name = backend_of(group, device)
    return not name or (name == "gloo" and device.type not in dist.Backend.backend_capability[name])


class _OnCopies(NamedTuple):
    """A work on copies in host memory. `wait` copies back what it has written, if it has."""

    work: Any
    copies: Sequence[Tensor]
    written: Tensor | None

    def wait(self) -> None:
        self.work.wait()
        if self.written is not None:
            self.written.copy_(self.copies[0])

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _begun(
    call: Callable[..., Any],
    group: dist.ProcessGroup,
    *tensors: Tensor,
    writes: bool = True,
    **options: Any,
) -> Any:
    """Start a call of torch.distributed on tensors, the first of which it may write (`writes`).

    Where no backend of the group takes them, on copies in host memory.
    """
    device = tensors[0].device
    if not _by_host(group, device):
        return call(*tensors, group=group, **options)
    _say_by_host(device.type, dist.get_backend_config(group))
    copies = [x.cpu() for x in tensors]
    work = call(*copies, group=group, **options)
    return _OnCopies(work, copies, tensors[0] if writes else None)


@functools.cache
def _say_by_host(kind: str, backends: str) -> None:
    text = explain(
        f"collectives of tensors on {kind} go through host memory, over gloo: slowly.",
        cause=f"the process group has {backends}, and no backend for {kind}.",
        fix=f"import what registers a backend of torch.distributed for {kind} before the group is "
        f'started; or name it: init_process_group("cpu:gloo,{kind}:...").',
    )
    warnings.warn(text, UserWarning, stacklevel=3)


def native(op: str) -> Any:
    """Return torch's tensor collective by the name it has: 2.13 renamed both."""
    names = {
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    }[op]
    for name in names:
        if name in vars(dist):
            return getattr(dist, name)
    raise AttributeError(f"torch.distributed has neither of {names}; fzero supports torch >= 2.11")


def in_one_go(op: str, pairs: Sequence[tuple[Tensor, Tensor]], axis: Axis) -> list[Any]:
    """Start one of torch's tensor collectives for all (output, input), as one launch."""
    if is_abstract():
        return []
    group = axis.group()
    with PARTLY_TYPED._coalescing_manager(group, async_ops=True) as manager:
        for out, x in pairs:
            native(op)(out, x, group=group)
    return manager.works


def as_bytes(x: Tensor) -> Tensor:
    """Return the memory of contiguous `x`: what is only copied may have a dtype of no backend."""
    return x.view(-1).view(torch.uint8)
