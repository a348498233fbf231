"""Sums over the leaves of a state in one order, whatever the stage and the number of ranks.

    flats [l] -> squares of blocks -> nodes of each leaf -> all-gather -> leaves -> all

A leaf is the fixed binary tree (`state/logical`) over its blocks, and all of them are the tree over
leaves, in the order of the layout. A rank has runs of whole blocks: it sums them to a few nodes of
each leaf that is cut, and every rank makes the rest from the nodes of all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.collectives import gather_many
from fzero.machine.packing import leaf_ranges
from fzero.ranks.mesh import Axis
from fzero.state import Layout, Placement, Setup
from fzero.state.layout import BLOCK, Part
from fzero.state.logical import Node, fold, nodes

_SMALL = 2**14
"""Flats of fewer elements are copied, so that one kernel squares several of them."""


class PlaceRun(NamedTuple):
    """The places [start, stop) of an item, a leaf or a row, that a rank has."""

    item: int
    start: int
    stop: int


class HeldRuns(NamedTuple):
    """What a rank has of one sum: its values [n], and which run each of them belongs to.

    at[i] is where the first value of runs[i] is; what no run covers is not counted.
    """

    values: Tensor
    runs: tuple[PlaceRun, ...]
    at: tuple[int, ...]


class _Plan(NamedTuple):
    """How all sums are made of the nodes that ranks send.

    A number below `width * ranks` is a node that a rank has sent. The sums of each level add two
    numbers of before, and are numbered behind them.
    """

    width: int  # nodes that each rank sends, with padding
    levels: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # (the earlier ones, the later)
    items: tuple[int, ...]  # of each item
    total: int  # -1 if there is none


def squares_of_blocks(flats: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of each block [n], fp32 or wider, of flats of whole blocks.

    The sum of a block is a function of its elements alone, not of what lies around it.

    Example:
        >>> squares_of_blocks([torch.ones(BLOCK), torch.full((2 * BLOCK,), 2.0)])
        tensor([ 64., 256., 256.])
    """
    made = [_squares(x) for x in _packed(flats)]
    return torch.cat(made) if made else torch.zeros(0)


def _squares(x: Tensor) -> Tensor:
    wide = _wide(x)
    if wide.device.type == "cpu":  # one pass, which reduces each row by itself
        return torch.linalg.vector_norm(wide, dim=1).square()
    return _halved(wide.square())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).view(-1, BLOCK)


def sums_of_blocks(flats: Iterable[Tensor]) -> Tensor:
    """Return the sum of each block [n], fp32 or wider, of flats of whole blocks.

    Example:
        >>> sums_of_blocks([torch.ones(2 * BLOCK)])
        tensor([64., 64.])
    """
    made = [_halved(_wide(x)) for x in _packed(flats)]
    # 0.0 in the place of -0.0: where a node is followed by nothing, 0.0 is added.
    return torch.cat(made) + 0.0 if made else torch.zeros(0)


def _halved(rows: Tensor) -> Tensor:
    """[n, 2^k] -> [n]: the sum of each row. torch's own sum may choose its order by n."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _packed(flats: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the elements of flats in order; small ones of one dtype together."""
    small: list[Tensor] = []
    for flat in (flat for flat in flats if flat.numel()):
        fits = flat.numel() < _SMALL and (not small or small[0].dtype is flat.dtype)
        if small and not fits:
            yield _joined(small)
            small = []
        if flat.numel() < _SMALL:
            small.append(flat)
        else:
            yield flat
    if small:
        yield _joined(small)


def _joined(some: list[Tensor]) -> Tensor:
    return some[0] if len(some) == 1 else torch.cat(some)


def sums_in_order(
    held: HeldRuns, ranks: Sequence[tuple[PlaceRun, ...]], places: tuple[int, ...], axis: Axis
) -> tuple[Tensor, Tensor]:
    """Return (the sum of each item [n], that of all of them []), equal on every rank.

    One all-gather, where the axis has several ranks.

    Args:
        held: what this rank has.
        ranks: the runs of every rank of the axis: those of one item are all of its places.
        places: of each item, at least 1.
        axis: the ranks.

    Example:
        >>> held = HeldRuns(torch.arange(5.0), (PlaceRun(0, 0, 3), PlaceRun(1, 0, 2)), (0, 3))
        >>> sums_in_order(held, [held.runs], (3, 2), Axis(size=1))
        (tensor([3., 7.]), tensor(10.))
    """
    plan = _plan(tuple(ranks), places)
    if plan.total < 0:
        nothing = held.values.new_zeros(1)
        return nothing[:0], nothing[0]
    pool = _folded(held, places)
    if axis.size > 1:
        padding = pool.new_zeros(plan.width - pool.numel())
        pool = gather_many([torch.cat([pool, padding])], axis)[0]
    for earlier, later in plan.levels:
        left, right = (torch.tensor(some, device=pool.device) for some in (earlier, later))
        pool = torch.cat([pool, pool[left] + pool[right]])
    return pool[torch.tensor(plan.items, device=pool.device)], pool[plan.total]


def _nodes_of(runs: Sequence[PlaceRun], places: Sequence[int]) -> list[tuple[int, Node]]:
    """Return the nodes that a rank sends of its runs, with their items: small ones come first."""
    found = [
        (run.item, node) for run in runs for node in nodes(run.start, run.stop, places[run.item])
    ]
    return sorted(found, key=lambda one: _level(one[1]))


def _level(node: Node) -> int:
    """Return how often two neighbours are added until a node is one number."""
    return (node[1] - node[0] - 1).bit_length()


def _folded(held: HeldRuns, places: Sequence[int]) -> Tensor:
    """Return the nodes of this rank's runs [n], in the order of `_nodes_of`.

    All of them are folded at once. They stand one behind the other, the largest first, each with
    zeros behind it to a power of two, so that neighbours are never of two nodes: what is one number
    already stands at the end, and is taken away. A zero behind a node changes nothing in it.
    """
    own = [
        (_level(node), at + node[0] - run.start, node[1] - node[0])
        for run, at in zip(held.runs, held.at, strict=True)
        for node in nodes(run.start, run.stop, places[run.item])
    ]
    if not own:
        return held.values[:0]
    own.sort(key=lambda one: one[0])
    pieces: list[Tensor] = []
    for level, at, size in sorted(own, key=lambda one: -one[0]):
        pieces.append(held.values[at : at + size])
        if size < 1 << level:
            pieces.append(held.values.new_zeros((1 << level) - size))
    line = _joined(pieces)
    done: list[Tensor] = []
    for level in range(own[-1][0] + 1):
        rest = line.numel() - sum(one[0] == level for one in own)
        done.append(line[rest:])
        line = line[:rest]
        line = line[0::2] + line[1::2]
    return torch.cat(done)


@lru_cache(maxsize=64)  # every step asks for the same ones
def _plan(ranks: tuple[tuple[PlaceRun, ...], ...], places: tuple[int, ...]) -> _Plan:
    sent = [_nodes_of(runs, places) for runs in ranks]
    width = max((len(some) for some in sent), default=0)
    if not width:
        return _Plan(0, (), (), -1)
    of_item: list[list[tuple[Node, int]]] = [[] for _ in places]
    for rank, some in enumerate(sent):
        for number, (item, node) in enumerate(some):
            of_item[item].append((node, rank * width + number))
    sums = _Sums(len(ranks) * width)
    items = [sums.folded(sorted(some), size) for some, size in zip(of_item, places, strict=True)]
    leaves = [((k, k + 1), value) for k, value in enumerate(items)]
    total = sums.folded(leaves, len(items))
    return sums.planned(width, items, total)


class _Sums:
    """Sums of two numbers, noted in the place of being made: those of one level need no other."""

    def __init__(self, given: int) -> None:
        self._level = dict.fromkeys(range(given), 0)
        self._made: list[tuple[int, int, int]] = []  # (level, the earlier, the later)
        self._given = given

    def add(self, earlier: int, later: int) -> int:
        """Note one; return its number."""
        number = self._given + len(self._made)
        self._level[number] = level = 1 + max(self._level[earlier], self._level[later])
        self._made.append((level, earlier, later))
        return number

    def folded(self, values: Iterable[tuple[Node, int]], places: int) -> int:
        """Note the sums of a tree; return the number of its total."""
        return fold(values, places, self.add)

    def planned(self, width: int, items: Sequence[int], total: int) -> _Plan:
        """Return all that was noted, level by level."""
        order = sorted(range(len(self._made)), key=lambda k: self._made[k][0])
        number = {k: k for k in range(self._given)}
        number |= {self._given + k: self._given + at for at, k in enumerate(order)}
        levels: dict[int, tuple[list[int], list[int]]] = {}
        for k in order:
            level, earlier, later = self._made[k]
            left, right = levels.setdefault(level, ([], []))
            left.append(number[earlier])
            right.append(number[later])
        made = tuple((tuple(left), tuple(right)) for left, right in levels.values())
        return _Plan(width, made, tuple(number[x] for x in items), number[total])


# The leaves of a state.


class LeafRuns(NamedTuple):
    """Which blocks of some leaves each rank has: an item is a leaf, or one of several of it."""

    places: tuple[int, ...]
    ranks: tuple[tuple[PlaceRun, ...], ...]
    own: tuple[PlaceRun, ...]  # of this rank
    at: tuple[int, ...]  # where they begin in the blocks of its flats, one behind the other


def learning_leaves(layout: Layout) -> tuple[int, ...]:
    """Return the leaves that learn and are not empty, in the order of the layout."""
    found = (i for index in layout.trainable for i in layout.groups[index].leaves)
    return tuple(sorted(i for i in found if layout.leaves[i].numel))


def leaf_runs(setup: Setup, placement: Placement, leaves: tuple[int, ...]) -> LeafRuns:
    """Return which blocks of leaves ranks have, of flats that are placed so."""
    axis = setup.over(placement)
    parts = tuple(setup.part(placement, rank) for rank in range(axis.size))
    return _leaf_runs(setup.layout, parts, axis.rank, leaves)


@lru_cache(maxsize=64)  # every step asks for the same ones
def _leaf_runs(
    layout: Layout, parts: tuple[Part, ...], rank: int, leaves: tuple[int, ...]
) -> LeafRuns:
    items: dict[int, list[int]] = {}
    for item, leaf in enumerate(leaves):
        items.setdefault(leaf, []).append(item)

    def runs(part: Part) -> list[tuple[PlaceRun, int]]:
        found, before = list[tuple[PlaceRun, int]](), 0
        for index in layout.trainable:
            for one in leaf_ranges(layout, index, part):
                start, stop = one.start // BLOCK, -(-one.stop // BLOCK)
                at = before + one.at // BLOCK
                found += [(PlaceRun(item, start, stop), at) for item in items.get(one.leaf, ())]
            before += layout.full_numel(index) // part.count // BLOCK
        return found

    ranks = [runs(part) for part in parts]
    return LeafRuns(
        places=tuple(-(-layout.leaves[leaf].numel // BLOCK) for leaf in leaves),
        ranks=tuple(tuple(run for run, _ in some) for some in ranks),
        own=tuple(run for run, _ in ranks[rank]),
        at=tuple(at for _, at in ranks[rank]),
    )


def square_sum(setup: Setup, flats: Iterable[Tensor], placement: Placement) -> Tensor:
    """Return the sum of the squares of all elements of leaves that learn, []. A collective.

    flats: what this rank has of them under a placement, of whole blocks.
    """
    runs = leaf_runs(setup, placement, learning_leaves(setup.layout))
    held = HeldRuns(squares_of_blocks(flats), runs.own, runs.at)
    return sums_in_order(held, runs.ranks, runs.places, setup.over(placement))[1]


# Elementwise kernels whose bits do not depend on where a tensor is cut, nor on threads.
#
# torch computes the elements at the end of a tensor that fill no vector one by one, and some
# kernels round otherwise there. Where a kernel runs on several threads, each has such an end. Of
# 1,000 elements in such ends differ (torch 2.13 on a CPU with AVX-512):
#
# | kernel                                              | fp64 | fp32 | bf16 | fp16 |
# |-----------------------------------------------------|------|------|------|------|
# | `add`, `mul`, `div`, `sqrt`, `lerp`, `addcmul`,     |    0 |    0 |    0 |    0 |
# | `addcdiv`, `sign`, `where`, `exp`, `log`, casts     |      |      |      |      |
# | `add(alpha=)`, also of `torch._foreach_add`         |    0 |    0 |   81 |   77 |
# | `rsqrt`                                             |    0 |    0 |  143 |  129 |
# | `pow(0.75)`                                         |    3 |    8 |    0 |    0 |
# | `sigmoid`                                           |    5 |   17 |    0 |    0 |
# | `atan2`                                             |    5 |   73 |    0 |    0 |
# | fused Adam, AdamW                                   |   12 |   26 |    0 |    0 |
# | fused SGD with momentum                             |   11 |   32 |    - |    - |
# | fused Adagrad                                       |    0 |    0 |    6 |   13 |
#
# So rules made of these differ, too: SGD, Adam, RMSprop and others in 16 bits without masters. None
# differs in whole blocks of 64 elements (`state.layout.BLOCK`), which are two vectors of 512 bits
# of a dtype of 16 bits. Fused kernels give each thread whole vectors. All others give each of t
# threads one t-th of the elements, if there are more than `_GRAIN`; so a tensor is cut where these
# are whole blocks, and what is left is too short for a second thread.

_GRAIN = 32_768
"""The elements that torch gives at least to each thread (at::internal::GRAIN_SIZE)."""


def threads_on(device: torch.device) -> int:
    """Return on how many threads an elementwise kernel runs there."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def even_spans(start: int, stop: int, threads: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into spans of which each thread gets whole blocks: one or two.

    Example:
        >>> even_spans(0, 100_032, 2), even_spans(0, 100_032, 1)
        ([(0, 99968), (99968, 100032)], [(0, 100032)])
    """
    numel = stop - start
    used = min(threads, -(-numel // _GRAIN))
    if used <= 1 or numel % (used * BLOCK) == 0:
        return [(start, stop)] if numel else []
    even = numel - numel % (used * BLOCK)
    if even <= (used - 1) * _GRAIN:  # so few that one thread less would run
        even = (used - 1) * _GRAIN
    return [(start, start + even), (start + even, stop)]


@contextmanager
def one_thread(wanted: bool) -> Generator[None]:
    """Run kernels on the CPU on one thread inside of the block, if that is `wanted`."""
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
