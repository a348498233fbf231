"""A fixed binary tree over n places: one order for a sum, whoever holds which places.

The node [start, stop) is the sum of two: it is cut at `start` plus the largest power of two below
`stop - start`. So which sums are made depends on n alone. Who holds a contiguous run of places
makes the sums of the few nodes that lie in it, and whoever gets the nodes of all makes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from fzero.errors import LayoutError

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
