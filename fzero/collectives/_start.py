"""The collectives without the wait: started now, waited for later, outside of autograd.

    flights = [start_scatter(fulls, axis) for fulls in buckets]    # on the wire from here on
    ...                                                            # compute something else
    shards = [flight.wait() for flight in flights]                   # in the order of the starts

Every rank must start *and wait* in the same order: what gloo and nccl match up is the order of
the calls, and a `start_reduce` that sums by exchange (`ordered`, or 16-bit floats on gloo) sends
its second half when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fzero.collectives import _lowering as lowering
from fzero.collectives._functions import of_nothing
from fzero.ranks.mesh import Axis, Runtime
from fzero.state.codec import Codec
from fzero.state.encoded import WireForm, decoded, encoded


class InFlight:
    """What a started collective will give.

    Holds every buffer of it until `wait` has returned, and then the outputs only. On a GPU, wait on
    the stream that it was started from: the memory that is then let go belongs to that stream.
    """

    __slots__ = ("_error", "_outs", "_rest", "_started")

    def __init__(self, started: lowering.Started, rest: Mapping[int, Tensor]) -> None:
        """Take what is under way, and {position: output} of what was never sent."""
        self._started: lowering.Started | None = started
        self._rest = rest
        self._outs: list[Tensor] = []
        self._error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would find all collectives of it over."""
        return self._started is None or self._started.is_over

    def wait(self) -> list[Tensor]:
        """Return the outputs, in the order of the inputs; again the same list if asked again.

        On a GPU the current stream waits, not the caller. Raises `AxisError`, every time, when
        another rank failed; the contents of outputs and of what was given up are then undefined.
        """
        if self._error is not None:
            raise self._error
        if self._started is not None:
            try:
                self._started.join()
                finish, self._started = self._started.finish, None  # what was sent goes here
                with torch.no_grad():
                    outs = finish()
            except Exception as error:
                # Not to be tried again: its second half may be on the wire already.
                self._error = error
                raise
            for at, out in sorted(self._rest.items()):
                outs.insert(at, out)
            self._outs, self._rest = outs, dict[int, Tensor]()
        return self._outs


def start_gather(
    shards: Sequence[Tensor], axis: Axis, *, codecs: Sequence[Codec | None] = ()
) -> InFlight:
    """Each [l] -> [W l], concatenated in rank order; see `gather_many`.

    codecs: what each is encoded by, if it is, and given as every rank decodes it; () for none.
    """
    if not any(codecs):
        return _start("gather", lowering.begin_all_gather, shards, axis)

    def begin(xs: Sequence[Tensor], axis: Axis) -> lowering.Started:
        return _begin_encoded_gather(xs, axis, codecs)

    return _start("gather", begin, shards, axis)


def _begin_encoded_gather(
    shards: Sequence[Tensor], axis: Axis, codecs: Sequence[Codec | None]
) -> lowering.Started:
    pairs = [*zip(codecs, shards, strict=True)]
    made = [None if codec is None else encoded(codec, x.view(1, -1)) for codec, x in pairs]
    sent = [x if one is None else one[0].reshape(-1) for x, one in zip(shards, made, strict=True)]
    started = lowering.begin_all_gather(sent, axis)

    forms = [(codec, one and one[1], x.dtype) for (codec, x), one in zip(pairs, made, strict=True)]

    def received(
        out: Tensor, codec: Codec | None, form: WireForm | None, dtype: torch.dtype
    ) -> Tensor:
        if codec is None or form is None:
            return out
        return decoded(codec, form.rows_of(out), form, dtype).reshape(-1)

    def finish() -> list[Tensor]:
        return [received(out, *form) for out, form in zip(started.finish(), forms, strict=True)]

    return started._replace(finish=finish)


def start_all_to_all(fulls: Sequence[Tensor], axis: Axis) -> InFlight:
    """Each [W l] -> [W l]: chunk s is what rank s has as its chunk for this rank."""
    return _start("all_to_all", lowering.begin_all_to_all, fulls, axis)


def start_permute(
    xs: Sequence[Tensor], axis: Axis, sources: Sequence[int], destinations: Sequence[int]
) -> InFlight:
    """Each [*t] -> [*t]: what the source of this rank has, or zeros."""

    def begin(xs: Sequence[Tensor], axis: Axis) -> lowering.Started:
        return lowering.begin_permute(xs, axis, sources, destinations)

    return _start("permute", begin, xs, axis)


def start_extremum(xs: Sequence[Tensor], axis: Axis, op: str) -> InFlight:
    """Each [*t] -> [*t]: the largest ("pmax") or the smallest ("pmin") of all ranks'.

    See the top of this file for the order of waits: its second half is sent in the wait.
    """

    def begin(xs: Sequence[Tensor], axis: Axis) -> lowering.Started:
        return lowering.begin_extremum(xs, axis, op)

    return _start("reduce", begin, xs, axis)


def start_scatter(fulls: Sequence[Tensor], axis: Axis, *, ordered: bool = False) -> InFlight:
    """Each [W l] -> [l]: this rank's shard of the sum over ranks; see `scatter_many`."""

    def begin(xs: Sequence[Tensor], axis: Axis) -> lowering.Started:
        return lowering.begin_reduce_scatter(xs, axis, ordered=ordered)

    return _start("scatter", begin, fulls, axis)


def start_reduce(values: Sequence[Tensor], axis: Axis, *, ordered: bool = False) -> InFlight:
    """Each [n] -> [n]: the sum over ranks. `values` are given up: it may write into them.

    See the top of this file for the order of waits, which matters here most.
    """

    def begin(xs: Sequence[Tensor], axis: Axis) -> lowering.Started:
        owned = [x.contiguous() for x in xs]  # a backend cannot write into anything else
        return lowering.begin_all_reduce(owned, axis, ordered=ordered, owned=True)

    return _start("reduce", begin, values, axis)


def start_gather_in_place(fulls: Sequence[Tensor], axis: Axis) -> InFlight:
    """Each [W l], contiguous: the shard of rank r is right on rank r only; fill in those of others.

    What is given are the `fulls`; nobody may read or write them before `wait` has returned.
    """
    fulls = [full.detach() for full in fulls]
    if axis.runtime is Runtime.LOCAL:
        return InFlight(lowering.given(fulls, axis), {})
    with torch.no_grad():
        # With the empty ones, which are counted, and not sent.
        return InFlight(lowering.begin_gather_in_place(fulls, axis), {})


def _start(
    kind: str,
    begin: Callable[[Sequence[Tensor], Axis], lowering.Started],
    xs: Sequence[Tensor],
    axis: Axis,
) -> InFlight:
    xs = [x.detach() for x in xs]
    if axis.runtime is Runtime.LOCAL:
        return InFlight(lowering.given(xs, axis), {})
    with torch.no_grad():
        wanted = [x for x in xs if x.numel()]
        rest = {at: of_nothing(kind, axis, x) for at, x in enumerate(xs) if not x.numel()}
        return InFlight(begin(wanted, axis) if wanted else lowering.given([], axis), rest)
