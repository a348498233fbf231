"""Gradients of one state -> what is sent of them -> their sum, and what encoding has lost.

    linear          x [r, n] -> encode [r, m] -> reduced as it is -> decode
    not linear      x [r, n] -> encode [r, m] -> all-to-all -> decode, sum [n]    the way there
                    sum [n]  -> encode [m]    -> all-gather -> decode [r n]       the way back

The way back is where ranks keep more of a sum than they have made of it: at stage 0, and on the
replicas of a mesh of two dims. Each way has a memory, e' = (g + e) - received(g + e), which
is added to the next g. So what all reductions have sent is the sum of all g, but for the last e,
which does not grow: it is what one encoding loses.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847, algorithm 2; Tang et
al., "DoubleSqueeze", arXiv 1905.05957, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.elementwise import Values, looks_beyond, sampled
from fzero.machine.packing import without_padding
from fzero.machine.powersgd import powersgd
from fzero.machine.residual import Memories, goes_back
from fzero.state import Placement, Setup
from fzero.state.codec import Codec, WireForm, decoded, encoded, is_by_rows, sum_of, wide

_TRIED = 1000  # elements that a codec is tried with


def require_codec(name: str, codec: Codec, of: str = "gradients") -> None:
    """Raise `LayoutError` for a codec that does not what it says: tried on a few numbers.

    of: what it encodes. "gradients" may be encoded as factors of matrices; of "parameters" it sees
        shards; of "frozen" leaves it has to give the same bytes on each rank, and each time.
    """
    if of != "gradients" and isinstance(codec, powersgd):
        raise LayoutError(
            f"{name}={codec}.",
            cause="parameters are gathered from shards, which cut matrices, and are of full rank.",
            fix="give it as gradients=, and here a codec of elements: fzero.codecs.int8().",
        )
    if wrong := _wrong_with(codec) or (_unlike(codec) if of == "frozen" else ""):
        raise LayoutError(
            f"{name}={codec}: {wrong}.",
            cause="a codec that encodes along other than the last dim, says a wrong size, is not "
            "as linear as it says, looks beyond single elements and has block=1, draws random "
            "numbers, or lacks one of its functions.",
            fix="see fzero.codecs.Codec: each row [n] of x [.., n] is encoded by itself, and its "
            "size is a function of n; a codec whose encoded forms do not add up has linear=False.",
        )


def _wrong_with(codec: Codec) -> str:
    """Return what a codec does on a few numbers that it does not say; "" if nothing."""
    x = _numbers()
    try:
        wrong = _wrong_in(codec, x) or (_wrong_sum(codec, x) if codec.linear else "")
        return wrong or _beyond_elements(codec, x)
    except _Raised as found:
        return str(found)


def _numbers() -> Tensor:
    return torch.linspace(-3.0, 2.0, 2 * _TRIED).view(2, _TRIED) ** 3


def _unlike(codec: Codec) -> str:
    if is_by_rows(codec, _numbers()):
        return ""
    return "a row is encoded to other bytes by itself, or the next time; or decoded to other values"


def _beyond_elements(codec: Codec, x: Tensor) -> str:
    """Try whether single elements are encoded by themselves, where a codec says so."""
    if getattr(codec, "block", None) != 1:
        return ""

    def received(values: Values) -> Values:
        row = values["x", "a row"].view(1, -1)
        parts = codec.encode(row)
        return {("x", "a row"): codec.decode(parts, row.shape[-1], x.dtype).view(-1)}

    if looks_beyond(received, {("x", "a row"): sampled(x)}) is None:
        return ""
    return "it says block=1, and what it makes of an element changes with others, or by its place"


class _Raised(Exception):
    """A function of a codec has raised."""


def _called(codec: Codec, name: str, *args: Any) -> Any:
    try:
        return getattr(codec, name)(*args)
    except NotImplementedError as error:
        raise _Raised(f"it has no function {name}") from error
    except Exception as error:
        text = " ".join(str(error).split())
        raise _Raised(f"{name} raised {type(error).__name__}: {text}") from error


def _wrong_in(codec: Codec, x: Tensor) -> str:
    parts = _called(codec, "encode", x)
    if not isinstance(parts, tuple) or not all(
        isinstance(part, Tensor) and part.shape[:-1] == x.shape[:-1] for part in parts
    ):
        return "encode gave no tuple of tensors [2, m] for a tensor [2, n]"
    if codec.linear and (len(parts) != 1 or not parts[0].is_floating_point()):
        return "it is linear, and encode gave other than one tensor of floats"
    sent = encoded(codec, x)[0]
    size, said = sent[0].numel() * sent.itemsize, _called(codec, "wire_bytes", _TRIED)
    if not isinstance(said, int | float) or abs(size - said) > said / 100:
        return f"{_TRIED} elements are {size} bytes, and wire_bytes says {said}"
    received = _called(codec, "decode", parts, _TRIED, x.dtype)
    if not isinstance(received, Tensor):
        return f"decode gave a {type(received).__name__} for [2, n] of {x.dtype}"
    if received.shape != x.shape or received.dtype is not x.dtype:
        return f"decode gave {[*received.shape]} of {received.dtype} for [2, n] of {x.dtype}"
    bound = _called(codec, "bound", x)
    if not isinstance(bound, Tensor) or not _fits(bound, x):
        shown = [*bound.shape] if isinstance(bound, Tensor) else f"a {type(bound).__name__}"
        return f"bound gave {shown} for [2, n]"
    if not bool(((received - x).abs() <= bound).all()):
        return "decode(encode(x)) is farther from x than bound(x) says"
    return ""


def _fits(bound: Tensor, x: Tensor) -> bool:
    try:
        return bound.expand_as(x).shape == x.shape
    except RuntimeError:
        return False


def _wrong_sum(codec: Codec, x: Tensor) -> str:
    """Try whether encoded forms add up: to within the bounds of both, and what adding rounds."""
    y = 0.37 * x.flip(-1) + 0.1
    (one,), (two,) = codec.encode(x), codec.encode(y)
    received = _called(codec, "decode", (one + two,), _TRIED, x.dtype)
    rounds = torch.finfo(one.dtype).eps * (x.abs() + y.abs()).amax(-1, keepdim=True)
    allowed = sum((codec.bound(some) for some in (x, y, x + y)), rounds)
    apart = (received - (x + y)).abs()
    if bool((apart <= allowed).all()):
        return ""
    return (
        f"it is linear, and decode(encode(x) + encode(y)) is {float(apart.max()):.3g} away from "
        "x + y, more than the bounds of x, y and x + y together"
    )


def coarseness(codec: Codec) -> float:
    """Return how far apart, of numbers of up to 1, are those that a codec can tell apart.

    Example:
        >>> from fzero.machine.codecs import int8
        >>> round(1 / coarseness(int8()))
        127
    """
    if isinstance(codec, powersgd):
        return 2.0  # all of a matrix may wait for the next update
    x = torch.linspace(-1.0, 1.0, _TRIED)
    return 2 * float(codec.bound(x).max())


class Encoder(Memories):
    """Encodes the gradients of one state, and adds to each what was lost of those before."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.codec is not None
        self.codec = setup.codec
        self._forms: dict[tuple[int, bool], WireForm] = {}

    def sent(self, index: int, gradient: Tensor, *, mine: bool = True) -> Tensor:
        """Return what is sent of a group's gradient [n]. Not `mine`: the memory stays as it is."""
        return self._encoded(index, gradient, back=False, remembers=mine)

    def sent_back(self, index: int, received: Tensor) -> Tensor:
        """Return what is sent of the part of the sum that this rank has received."""
        return self._encoded(index, self.summed(index, received), back=True, remembers=True)

    def summed(self, index: int, received: Tensor) -> Tensor:
        """Return what this rank has received of a sum over ranks, added up."""
        form, dtype = self._forms[index, False], self._dtype(index)
        rows = form.rows_of(received)
        if self.codec.linear:
            return decoded(self.codec, rows, form, dtype).reshape(-1)
        return sum_of(self.codec, rows, form, dtype)

    def result(self, index: int, received: Tensor) -> Tensor:
        """Return this rank's part of the sum: what the last collective brought, without padding."""
        if goes_back(self._setup):
            total = self.gathered(index, received)
        else:
            total = self.summed(index, received)
        part = self._setup.part(self._setup.gradients, self._setup.axis.rank)
        return without_padding(self._setup.layout, index, part, total)

    def gathered(self, index: int, received: Tensor) -> Tensor:
        """Return the parts of the sum that the ranks have sent back, end to end."""
        form = self._forms[index, True]
        return decoded(self.codec, form.rows_of(received), form, self._dtype(index)).reshape(-1)

    def _encoded(self, index: int, values: Tensor, *, back: bool, remembers: bool) -> Tensor:
        """Encode values and what the memory holds; keep what that loses, where it is finite."""
        slot = self._slot.get((index, back)) if remembers else None
        total = values.to(wide(values.dtype))
        total = total if back else self.shared(total, slot)
        if back and slot is not None:
            total = total + self.remembered(slot).to(total.dtype) * self._scale
        rows = total.view(1, -1) if back else self._in_rows(total)
        buffer, form = encoded(self.codec, rows)
        self._forms[index, back] = form
        if slot is not None:
            rows = rows - decoded(self.codec, buffer, form, rows.dtype)
            self.remember(slot, rows.reshape(-1) if back else self._in_order(rows))
        return buffer.reshape(-1)

    def _dtype(self, index: int) -> torch.dtype:
        return wide(self._setup.accumulate_dtype(index))

    # Which elements are a row: what one rank decodes, in the order of the ranks.

    @property
    def _grid(self) -> tuple[int, int]:
        """Shards and replicas that rows are for; the flat has them in this order."""
        setup = self._setup
        shards = setup.layout.ranks if setup.reduction.over == "all" else 1
        if self.codec.linear:  # reduced first over the shards, then over the replicas
            if setup.gradients is Placement.REPLICATED:
                return 1, 1
            return shards, setup.replicas if setup.gradients is Placement.OVER_ALL else 1
        return shards, setup.replicas

    @property
    def _by_replica(self) -> bool:
        """Whether rows are ordered by replica, then shard, and the flat is the other way around."""
        moved = self._setup.gradients is not Placement.REPLICATED and not self.codec.linear
        return moved and min(self._grid) > 1

    def _in_rows(self, flat: Tensor) -> Tensor:
        shards, replicas = self._grid
        numel = flat.numel() // (shards * replicas)
        if not self._by_replica:
            return flat.view(shards * replicas, numel)
        return flat.view(shards, replicas, numel).transpose(0, 1).reshape(-1, numel)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Undo `_in_rows`."""
        if not self._by_replica:
            return rows.reshape(-1)
        shards, replicas = self._grid
        return rows.view(replicas, shards, rows.shape[1]).transpose(0, 1).reshape(-1)
