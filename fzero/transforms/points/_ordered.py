"""Sums over pieces in a layout of blocks: one order, at any stage and on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero.machine.packing import leaf_ranges
from fzero.machine.tree_sum import (
    HeldRuns,
    PlaceRun,
    folded_rows,
    leaf_runs,
    squares_of_blocks,
    sums_in_order,
    sums_of_blocks,
)
from fzero.state import Layout, Setup
from fzero.state.layout import BLOCK, Part

LeafPiece = tuple[int, Tensor]
"""(a leaf, a tensor that is parallel to this rank's elements of it, 1-D)."""


def leaf_sums(
    setup: Setup, pieces: Sequence[LeafPiece], *, of_squares: bool
) -> tuple[Tensor, Tensor]:
    """Return (the sum over each leaf [n], that over all of them []), fp32 or wider. A collective.

    A leaf may be there several times. of_squares: sums of |x|^2.
    """
    layout, placement = setup.layout, setup.optimizer_state
    order = sorted(range(len(pieces)), key=lambda k: pieces[k][0])
    order = [k for k in order if layout.leaves[pieces[k][0]].numel]
    runs = leaf_runs(setup, placement, tuple(pieces[k][0] for k in order))
    flats, at, length = list[Tensor](), list[int](), 0
    for run in runs.own:
        at.append(length)
        length += run.stop - run.start
        leaf, x = pieces[order[run.item]]
        stored = _as_stored(x, complex_leaf=layout.leaves[leaf].dtype.is_complex)
        flats.append(pad(stored, (0, -stored.numel() % BLOCK)))
    wide = _wide([x for _, x in pieces])
    made = squares_of_blocks(flats) if of_squares else sums_of_blocks(flats)
    values = made.to(pieces[0][1].device if pieces else made.device, wide)
    held = HeldRuns(values, runs.own, tuple(at))
    by_item, total = sums_in_order(held, runs.ranks, runs.places, setup.over(placement))
    found = list(values.new_zeros(len(pieces)).unbind())
    for k, x in zip(order, by_item.unbind(), strict=True):
        found[k] = x
    return torch.stack(found) if found else values.new_zeros(0), total


def _as_stored(x: Tensor, *, complex_leaf: bool) -> Tensor:
    """Return the elements as a flat has them: two for each of a complex leaf."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()).reshape(-1)
    if complex_leaf:  # a real number for each complex one
        return torch.stack((x.reshape(-1), torch.zeros_like(x).reshape(-1)), dim=1).view(-1)
    return x.reshape(-1)


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    wide = torch.float32
    for x in tensors:
        wide = torch.promote_types(wide, x.dtype.to_real() if x.is_complex() else x.dtype)
    return wide


class _Rows(NamedTuple):
    """Which rows are on several ranks: an item is one of them, with a place for each element."""

    places: tuple[int, ...]
    ranks: tuple[tuple[PlaceRun, ...], ...]
    item: dict[tuple[int, int], int]  # (leaf, row) -> the number of a cut row
    spans: dict[int, tuple[int, int]]  # of each leaf: this rank's elements


def row_sums(setup: Setup, pieces: Sequence[LeafPiece]) -> list[Tensor]:
    """Return, for each element of a piece, the sum over the whole row that it is in. A collective.

    A row has all elements with one index of the first dim; a leaf of fewer than two dims is one.
    pieces: of real numbers, none of which is -0.0, one for each element of a leaf.
    """
    axis, wide = setup.over(setup.optimizer_state), _wide([x for _, x in pieces])
    parts = tuple(setup.part(setup.optimizer_state, rank) for rank in range(axis.size))
    rows = _rows(setup.layout, parts, axis.rank, tuple(leaf for leaf, _ in pieces))
    device = pieces[0][1].device if pieces else torch.device("cpu")
    own = rows.ranks[axis.rank]
    numbers = {number: key for key, number in rows.item.items()}
    values = {leaf: x.reshape(-1).to(wide) for leaf, x in pieces}
    cut, at, length = [torch.zeros(0, dtype=wide, device=device)], list[int](), 0
    for run in own:
        leaf, row = numbers[run.item]
        begin = row * row_numel(setup.layout, leaf) + run.start - rows.spans[leaf][0]
        cut.append(values[leaf][begin : begin + run.stop - run.start])
        at.append(length)
        length += run.stop - run.start
    held = HeldRuns(torch.cat(cut), own, tuple(at))
    totals = sums_in_order(held, rows.ranks, rows.places, axis)[0]
    return [_of_elements(setup.layout, rows, leaf, values[leaf], totals) for leaf, _ in pieces]


def _of_elements(layout: Layout, rows: _Rows, leaf: int, x: Tensor, totals: Tensor) -> Tensor:
    if not x.numel():
        return x
    size, (start, stop) = row_numel(layout, leaf), rows.spans[leaf]
    first, last = start // size, (stop - 1) // size
    low, high = first + (start % size > 0), stop // size  # the rows that are whole here
    found = list[Tensor]()
    if (number := rows.item.get((leaf, first))) is not None:
        found.append(totals[number : number + 1])
    if low < high:
        whole = x[low * size - start : high * size - start].view(high - low, size)
        found.append(folded_rows(whole))
    if last > first and (number := rows.item.get((leaf, last))) is not None:
        found.append(totals[number : number + 1])
    sums = torch.cat(found)
    return sums[torch.arange(start, stop, device=x.device) // size - first]


def row_numel(layout: Layout, leaf: int) -> int:
    """Return how many elements a row of a leaf has: all, if it has fewer than two dims."""
    shape = layout.leaves[leaf].shape
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


@lru_cache(maxsize=64)  # every step asks for the same ones
def _rows(layout: Layout, parts: tuple[Part, ...], rank: int, leaves: tuple[int, ...]) -> _Rows:
    spans = [_spans(layout, part, frozenset(leaves)) for part in parts]
    item: dict[tuple[int, int], int] = {}
    ranks: list[tuple[PlaceRun, ...]] = []
    for own in spans:
        found = list[PlaceRun]()
        for leaf in leaves:
            start, stop = own.get(leaf, (0, 0))
            size = row_numel(layout, leaf)
            edges = sorted({start // size, (stop - 1) // size}) if start < stop else []
            for row in edges:
                low, high = max(start - row * size, 0), min(stop - row * size, size)
                if high - low < size:
                    number = item.setdefault((leaf, row), len(item))
                    found.append(PlaceRun(number, low, high))
        ranks.append(tuple(found))
    places = tuple(row_numel(layout, leaf) for leaf, _ in item)
    return _Rows(places, tuple(ranks), item, spans[rank])


def _spans(layout: Layout, part: Part, leaves: frozenset[int]) -> dict[int, tuple[int, int]]:
    """Return which elements of each leaf are in a part of the flats that learn."""
    found: dict[int, tuple[int, int]] = {}
    for index in layout.trainable:
        for one in leaf_ranges(layout, index, part):
            if one.leaf in leaves:
                two = 2 if layout.leaves[one.leaf].dtype.is_complex else 1
                found[one.leaf] = (one.start // two, one.stop // two)
    return found
