"""Logical ranks: those that a run is written for, whatever number of ranks carries them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fzero.errors import LayoutError, check


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """How many logical ranks a run has, and the seed of their generators.

    Example:
        >>> Logical(ranks=8).seed
        0
    """

    ranks: int
    seed: int = 0


def share(index: int, parts: int, count: int) -> range:
    """Return part `index` of range(count), cut into `parts` runs as even as can be.

    The runs are in order and cover it; their sizes differ by at most 1, and the earlier ones are
    the longer ones; with fewer numbers than parts the later ones are empty. If some neighbouring
    runs are joined and cut again into as many parts, they are the same ones.

    Example:
        >>> [[*share(index, 3, 5)] for index in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    size, longer = divmod(count, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def carried(rank: int, size: int, logical_ranks: int) -> range:
    """Return the logical ranks that rank `rank` of `size` carries: a contiguous run, never empty.

    Raises:
        LayoutError: for more ranks than logical ranks.

    Example:
        >>> [carried(rank, 3, 8) for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 8)]
    """
    if size > logical_ranks:
        raise LayoutError(
            f"logical_ranks={logical_ranks}, and there are {size} ranks.",
            cause="more processes than the run was begun for: each rank carries at least one "
            "logical rank.",
            fix=f"start {logical_ranks} ranks or fewer, or begin a run with logical_ranks={size}.",
        )
    return share(rank, size, logical_ranks)


# `fold_in`: a seed for each place of a program, by a counter-based hash. Pure.

_WORD = 2**64 - 1
_MULTIPLIER = 0xD2B74407B1CE6E93
_WEYL = 0x9E3779B97F4A7C15  # what the key grows by from round to round
_ROUNDS = 10


def fold_in(seed: int, *numbers: int) -> int:
    """Return a seed of its own for each sequence of numbers, as `jax.random.fold_in` does for keys.

    s_0 = seed and s_i = floor(x_i / 2), where x_i is the first of the two words of Philox2x64-10
    with the counter (n_i, 0) and the key s_{i-1}; the last s_i is returned. So it is a pure
    function of its arguments, the same on every machine; the order of the numbers matters; and
    fold_in(fold_in(seed, a), b) == fold_in(seed, a, b). Without numbers it is the seed itself.

    It is for random numbers, and no secret: who knows the seed can compute all that follows.

    Args:
        seed: of the program, an int of 0 to 2**63 - 1.
        numbers: what tells one place from others (an update, a rank, a row), any count of ints of
            0 to 2**63 - 1.

    Returns:
        An int of 0 to 2**63 - 1, which an int64 holds and `torch.manual_seed` takes. The CPU's
        generator looks at the lower 32 bits of what `torch.manual_seed` is given, that of CUDA at
        all of them.

    Raises:
        LayoutError: for a bool, a float or another thing that is no int, and for an int out of
            range.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Example:
        >>> import torch, fzero
        >>> update, row = 7, 3
        >>> fzero.fold_in(0, update, row)
        4445324743741337287
        >>> generator = torch.Generator().manual_seed(fzero.fold_in(0, update, row))
        >>> torch.rand(2, generator=generator)
        tensor([0.6540, 0.8295])
    """
    _require("seed", seed)
    for place, number in enumerate(numbers):
        _require(f"numbers[{place}]", number)
        seed = philox(number, 0, seed)[0] >> 1
    return seed


def philox(first: int, second: int, key: int) -> tuple[int, int]:
    """Return the two words of Philox2x64-10 for a counter of two words and a key of one."""
    for _ in range(_ROUNDS):
        product = _MULTIPLIER * first
        first, second = product >> 64 ^ key ^ second, product & _WORD
        key = key + _WEYL & _WORD
    return first, second


def _require(name: str, value: Any) -> None:
    if type(value) is int and 0 <= value < 2**63:  # of each logical rank in each batch
        return
    check.require(
        f"fold_in: {name}",
        value,
        lambda x: check.is_count(x, least=0) and x < 2**63,
        "an int of 0 to 2**63 - 1; int(x) of a tensor or an array, x % 2**63 of one out of range",
        cause="a number that is negative or too large, or a float, a bool or a tensor.",
    )


# A fixed binary tree over n places: one order for a sum, whoever holds which places.
#
# The node [start, stop) is the sum of two: it is cut at `start` plus the largest power of two below
# `stop - start`. So which sums are made depends on n alone. Who holds a contiguous run of places
# makes the sums of the few nodes that lie in it, and whoever gets the nodes of all makes the rest.

T = TypeVar("T")

Node = tuple[int, int]
"""The places [start, stop) of a node."""


def nodes(start: int, stop: int, places: int) -> tuple[Node, ...]:
    """Cut the places [start, stop) into the fewest nodes of the tree, in order.

    They are at most 2 log2(places), and at least 1 if start < stop.

    Example:
        >>> nodes(0, 7, 7), nodes(1, 7, 7), nodes(0, 6, 7)
        (((0, 7),), ((1, 2), (2, 4), (4, 7)), ((0, 4), (4, 6)))
    """
    found: list[Node] = []
    while start < stop:
        end = stop if _is_node(start, stop, places) else start + _largest(start, stop)
        found.append((start, end))
        start = end
    return tuple(found)


def push(
    held: tuple[tuple[Node, T], ...],
    node: Node,
    value: T,
    places: int,
    add: Callable[[T, T], T],
) -> tuple[tuple[Node, T], ...]:
    """Return what is held after the value of the next node has come: whole nodes, in order.

    `node` begins where the last one held ends. Two nodes that make up a third are added at once,
    the earlier one first, so `held` has the `nodes` of all places since the first that came.

    Example:
        >>> held = ()
        >>> for place in range(1, 5):
        ...     held = push(held, (place, place + 1), f"x{place}", 5, lambda a, b: f"({a}+{b})")
        >>> held
        (((1, 2), 'x1'), ((2, 4), '(x2+x3)'), ((4, 5), 'x4'))
    """
    while held and _is_parent(held[-1][0], node, places):
        (start, _), earlier = held[-1]
        held, node, value = held[:-1], (start, node[1]), add(earlier, value)
    return (*held, (node, value))


def fold(values: Iterable[tuple[Node, T]], places: int, add: Callable[[T, T], T]) -> T:
    """Return the sum over all places, from the values of nodes that cover them in order.

    Which nodes they are makes no difference to the order of the additions.

    Example:
        >>> fold([((0, 2), "(x0+x1)"), ((2, 3), "x2")], 3, lambda a, b: f"({a}+{b})")
        '((x0+x1)+x2)'
    """
    held: tuple[tuple[Node, T], ...] = ()
    for node, value in values:
        held = push(held, node, value, places, add)
    if len(held) != 1 or held[0][0] != (0, places):
        raise LayoutError(
            f"the nodes {[node for node, _ in held]} are not all of {places} places.",
            cause="places are missing, there twice or out of order.",
            fix="hand over nodes in order, such that each begins where the last one ends.",
        )
    return held[0][1]


def _largest(start: int, stop: int) -> int:
    """Return the size of the largest node that begins at `start`, and ends before the last place.

    Such nodes are the powers of two of which `start` is a multiple.
    """
    return 1 << min((stop - start).bit_length() - 1, _zeros(start))


def _is_node(start: int, stop: int, places: int) -> bool:
    """Whether [start, stop) is a node: a power of two of places, or all from `start` to the end."""
    size = stop - start
    return (stop == places or size & (size - 1) == 0) and (size - 1).bit_length() <= _zeros(start)


def _is_parent(left: Node, right: Node, places: int) -> bool:
    """Whether two neighbours make up a node: the left one is as large as it can be."""
    size, rest = left[1] - left[0], right[1] - right[0]
    is_left = left[1] == right[0] and size & (size - 1) == 0 and rest <= size
    return is_left and _is_node(left[0], right[1], places)


def _zeros(start: int) -> int:
    """Return how often two divides a number; 0 is divided without an end."""
    return (start & -start).bit_length() - 1 if start else 1 << 30
