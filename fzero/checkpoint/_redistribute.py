"""From the pieces that ranks hold to those that they are to hold: all-to-alls, batch by batch.

    has     this rank's own part of all that there is: what it gives to others
    holds   what it can copy for itself; `has`, and what other ranks hold, too
    wants   pieces of new memory, to be filled

Every rank says what it has for the others, and what it lacks. From that each of them knows all
batches, and what goes from any rank to any other in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._pieces import TensorPiece
from fzero.collectives import start_uneven_all_to_all
from fzero.machine.offload import to_device
from fzero.ranks.mesh import Axis

Named = dict[str, list[TensorPiece]]


def copied(holds: Sequence[TensorPiece], wants: Sequence[TensorPiece]) -> Stock:
    """Fill what this rank wants and holds itself; return what it lacks then."""
    sources, own = by_name(holds), spans_of(holds)
    for want in wants:
        start, stop = want.start, want.start + want.values.numel()
        for held in sources.get(want.name, ()):
            low, high = max(start, held.start), min(stop, held.start + held.values.numel())
            if low < high:
                _of(want, low, high).copy_(_of(held, low, high), non_blocking=True)
    left = {name: without(spans, own.get(name, ())) for name, spans in spans_of(wants).items()}
    lacks = {name: spans for name, spans in left.items() if spans}
    itemsizes = {want.name: want.values.dtype.itemsize for want in wants if want.name in lacks}
    return Stock({}, lacks, itemsizes)


def redistribute(
    has: Sequence[TensorPiece],
    wants: Sequence[TensorPiece],
    stocks: Sequence[Stock],
    axis: Axis,
    device: torch.device,
    *,
    batch_bytes: int,
) -> None:
    """Fill what ranks lack from what others have: one all-to-all for each batch. A collective.

    stocks: of every rank of the axis. device: where this rank communicates from.
    batch_bytes: what a rank sends at once, and what it receives at once, is no more.
    """
    sources, targets, rank = by_name(has), by_name(wants), axis.rank

    def nbytes(crossing: Crossing) -> int:
        itemsize = targets[crossing.name][0].values.dtype.itemsize
        return (crossing.stop - crossing.start) * itemsize

    def exchange(batch: Mapping[str, Span]) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        packed: dict[tuple[Crossing, ...], Tensor] = {(): nothing}
        sent, arriving = list[Tensor](), list[list[Crossing]]()
        for r, other in enumerate(stocks):
            away = r != rank
            going = tuple(crossings(other.lacks, stocks[rank].has, batch)) if away else ()
            if going not in packed:  # what several ranks lack is packed once
                packed[going] = _packed(sources, going, device)
            sent.append(packed[going])
            arriving.append([*crossings(stocks[rank].lacks, other.has, batch)] if away else [])
        sizes = [sum(map(nbytes, some)) for some in arriving]
        total = sum(stop - start for start, stop in batch.values())
        flight = start_uneven_all_to_all(sent, sizes, axis, total=total)
        for some, received in zip(arriving, flight.wait(), strict=True):
            chunks = received.split([*map(nbytes, some)]) if some else ()
            for one, chunk in zip(some, chunks, strict=True):
                for piece, low, high in _inside(targets[one.name], one):
                    itemsize = piece.values.dtype.itemsize
                    own = chunk[(low - one.start) * itemsize : (high - one.start) * itemsize]
                    _as_bytes(_of(piece, low, high)).copy_(own, non_blocking=True)

    for batch in batches_of(stocks, batch_bytes):
        exchange(batch)  # nothing of a batch outlives it


def by_name(pieces: Sequence[TensorPiece]) -> Named:
    """Return the pieces of each logical tensor."""
    found: Named = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def _packed(sources: Named, going: Sequence[Crossing], device: torch.device) -> Tensor:
    """Return the bytes of what goes to another rank: a view of what is held, if it is one range."""
    parts = [
        to_device(_as_bytes(_of(piece, low, high)), device)
        for one in going
        for piece, low, high in _inside(sources[one.name], one)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _inside(pieces: Sequence[TensorPiece], one: Crossing) -> Iterator[tuple[TensorPiece, int, int]]:
    """Yield (piece, first, behind the last) of the elements that cross, in their order."""
    for piece in sorted(pieces, key=lambda piece: piece.start):
        low = max(piece.start, one.start)
        high = min(piece.start + piece.values.numel(), one.stop)
        if low < high:
            yield piece, low, high


def _of(piece: TensorPiece, start: int, stop: int) -> Tensor:
    return piece.values[start - piece.start : stop - piece.start]


def _as_bytes(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.reshape(-1).view(torch.uint8)


Span = tuple[int, int]
"""The first of some elements, and the one behind the last."""
Spans = dict[str, list[Span]]
"""{logical tensor: its elements}, in ascending order."""


class Stock(NamedTuple):
    """What one rank has, and lacks."""

    has: Spans  # for others: of all ranks together, each element once
    lacks: Spans  # of what it is to hold
    itemsizes: dict[str, int]  # bytes of an element of what it lacks


class Crossing(NamedTuple):
    """Elements `start` to `stop` of the logical tensor `name`, which go to another rank."""

    name: str
    start: int
    stop: int


def spans_of(pieces: Iterable[TensorPiece]) -> Spans:
    """Return which elements the pieces hold."""
    found: Spans = {}
    for piece in pieces:
        if numel := piece.values.numel():
            found.setdefault(piece.name, []).append((piece.start, piece.start + numel))
    return {name: sorted(some) for name, some in found.items()}


def without(some: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """Return the elements that are in `some` and not in `taken`.

    Example:
        >>> without([(0, 9)], [(2, 4), (6, 7)])
        [(0, 2), (4, 6), (7, 9)]
    """
    left = list(some)
    for start, stop in taken:
        cut = ((low, min(high, start), max(low, stop), high) for low, high in left)
        both = [span for a, b, c, d in cut for span in ((a, b), (c, d))]
        left = [(low, high) for low, high in both if low < high]
    return left


def batches_of(stocks: Sequence[Stock], batch_bytes: int) -> Iterator[dict[str, Span]]:
    """Yield the elements of each batch: of all that any rank lacks, at most so many bytes.

    Example:
        >>> lacking = Stock({}, {"w": [(0, 5)], "b": [(0, 2)]}, {"w": 4, "b": 4})
        >>> list(batches_of([lacking], 16))
        [{'w': (0, 4)}, {'w': (4, 5), 'b': (0, 2)}]
    """
    batch: dict[str, Span] = {}
    left = batch_bytes
    for name in dict.fromkeys(name for stock in stocks for name in stock.lacks):
        itemsize = next(stock.itemsizes[name] for stock in stocks if name in stock.lacks)
        for start, stop in _union(span for stock in stocks for span in stock.lacks.get(name, ())):
            while start < stop:
                if left < itemsize:
                    yield batch
                    batch, left = {}, batch_bytes
                end = min(stop, start + max(left, itemsize) // itemsize)
                batch[name] = batch.get(name, (start, end))[0], end
                left -= (end - start) * itemsize
                start = end
    if batch:
        yield batch


def crossings(
    lacks: Mapping[str, Sequence[Span]],
    has: Mapping[str, Sequence[Span]],
    batch: Mapping[str, Span],
) -> Iterator[Crossing]:
    """Yield what goes in a batch from a rank that has these elements to one that lacks those."""
    for name, (first, last) in batch.items():
        for low, high in lacks.get(name, ()):
            for start, stop in has.get(name, ()):
                start, stop = max(start, low, first), min(stop, high, last)
                if start < stop:
                    yield Crossing(name, start, stop)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the elements that are in any of the spans, in ascending order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found
