"""Which elements of which logical tensor cross ranks, batch by batch: pure, the same on all ranks.

Every rank says what it has for the others, and what it lacks. From that each of them knows all
batches, and what goes from any rank to any other in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fzero.checkpoint._pieces import TensorPiece

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


def crossing(
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
