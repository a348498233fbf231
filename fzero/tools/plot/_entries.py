"""Group leaves into few legend entries, one for each colour."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from fzero.tools.plot._palette import COLOURS


class Entries(NamedTuple):
    """The labels of a legend, one for each colour, and the entry number of each leaf."""

    labels: tuple[str, ...]
    of_leaf: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def entries_of(leaves: tuple[str, ...]) -> Entries:
    """Return a colour for each leaf; with more leaves than colours, neighbours share one.

    Neighbours have paths that begin with the same parts, as many as the colours allow: the
    parameters of a module, of a block, or of several consecutive blocks.

    Example:
        >>> entries_of(("embed.w", "head.w")).labels
        ('embed.w', 'head.w')
        >>> blocks = [f"h.{i}.{name}" for i in range(40) for name in ("w", "b")]
        >>> entries_of(("embed.w", *blocks, "head.w")).labels[:3]
        ('embed.w', 'h.0 to h.2 (6 leaves)', 'h.3 to h.5 (6 leaves)')
    """
    parts = [tuple(leaf.split(".")) for leaf in leaves]
    numbers = list(range(len(leaves)))
    if len(leaves) <= COLOURS:
        return Entries(leaves, tuple(numbers))
    depth = max(map(len, parts))
    while len(_runs(numbers, parts, depth)) > COLOURS:
        depth -= 1
    whole = {some[0]: some[-1] for some in _runs(numbers, parts, depth)}
    coarse = [_runs(some, parts, depth + 1) for some in _runs(numbers, parts, depth)]
    rest, more = COLOURS - len(coarse), sum(len(fine) - 1 for fine in coarse)
    bins: list[list[list[int]]] = []
    for fine in coarse:
        count = 1 + (rest * (len(fine) - 1) // more if more else 0)
        size = -(-len(fine) // count)
        bins += [fine[i : i + size] for i in range(0, len(fine), size)]
    of_leaf = [0] * len(leaves)
    for entry, some in enumerate(bins):
        for leaf in (leaf for run in some for leaf in run):
            of_leaf[leaf] = entry
    labels = [
        # All leaves that begin with the same parts are called by these.
        _label(some, leaves, parts, depth - (depth and whole.get(some[0][0]) == some[-1][-1]))
        for some in bins
    ]
    return Entries(tuple(labels), tuple(of_leaf))


def _runs(numbers: Sequence[int], parts: Sequence[tuple[str, ...]], depth: int) -> list[list[int]]:
    """Split leaves into consecutive ones whose paths begin with the same `depth` parts."""
    return [list(some) for _, some in groupby(numbers, key=lambda leaf: parts[leaf][:depth])]


def _label(
    runs: list[list[int]],
    leaves: Sequence[str],
    parts: Sequence[tuple[str, ...]],
    depth: int,
) -> str:
    """Return the label of the leaves of an entry."""
    first, last = runs[0][0], runs[-1][-1]
    if first == last:
        return leaves[first]
    head, tail = (".".join(parts[leaf][: depth + 1]) for leaf in (first, last))
    count = sum(map(len, runs))
    return f"{head} ({count} leaves)" if head == tail else f"{head} to {tail} ({count} leaves)"
