"""From the pieces that ranks hold to those that they are to hold: all-to-alls, batch by batch.

has     this rank's own part of all that there is: what it gives to others
holds   what it can copy for itself; `has`, and what other ranks hold, too
wants   pieces of new memory, to be filled
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint._spans import Crossing, Span, Stock, batches_of, crossing, spans_of, without
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


def carry(
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
    sources, targets = by_name(has), by_name(wants)
    for batch in batches_of(stocks, batch_bytes):  # nothing of a batch outlives it
        _carry_batch(batch, sources, targets, stocks, axis, device)


def _carry_batch(
    batch: Mapping[str, Span],
    sources: Named,
    targets: Named,
    stocks: Sequence[Stock],
    axis: Axis,
    device: torch.device,
) -> None:
    rank = axis.rank
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    packed: dict[tuple[Crossing, ...], Tensor] = {(): nothing}
    sent, arriving = [], []
    for r, other in enumerate(stocks):
        away = r != rank
        going = tuple(crossing(other.lacks, stocks[rank].has, batch)) if away else ()
        if going not in packed:  # what several ranks lack is packed once
            packed[going] = _packed(sources, going, device)
        sent.append(packed[going])
        arriving.append([*crossing(stocks[rank].lacks, other.has, batch)] if away else [])
    sizes = [sum(_numbers_of_bytes(targets, some)) for some in arriving]
    total = sum(stop - start for start, stop in batch.values())
    flight = start_uneven_all_to_all(sent, sizes, axis, total=total)
    for some, received in zip(arriving, flight.wait(), strict=True):
        chunks = received.split([*_numbers_of_bytes(targets, some)]) if some else ()
        for one, chunk in zip(some, chunks, strict=True):
            _unpack(targets[one.name], one, chunk)


def by_name(pieces: Sequence[TensorPiece]) -> Named:
    """Return the pieces of each logical tensor."""
    found: Named = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def _numbers_of_bytes(targets: Named, some: Sequence[Crossing]) -> Iterator[int]:
    for name, start, stop in some:
        yield (stop - start) * targets[name][0].values.dtype.itemsize


def _packed(sources: Named, going: Sequence[Crossing], device: torch.device) -> Tensor:
    """Return the bytes of what goes to another rank: a view of what is held, if it is one range."""
    parts = [
        to_device(_as_bytes(_of(piece, low, high)), device)
        for one in going
        for piece, low, high in _inside(sources[one.name], one)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpack(targets: Sequence[TensorPiece], one: Crossing, chunk: Tensor) -> None:
    for piece, low, high in _inside(targets, one):
        itemsize = piece.values.dtype.itemsize
        own = chunk[(low - one.start) * itemsize : (high - one.start) * itemsize]
        _as_bytes(_of(piece, low, high)).copy_(own, non_blocking=True)


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
