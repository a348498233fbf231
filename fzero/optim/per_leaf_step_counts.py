"""Which leaves have counters of their own: those that missed an update of their group.

Counters are numbered. Each group of leaves has one number, under which all that its leaves count
is kept once. A leaf that an update leaves out goes on under another number, `apart`, with those
that were left out with it. So as long as all leaves take each step nothing is apart, and which
leaves count alike is known without a look at a counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import NamedTuple, TypeVar

Apart = tuple[tuple[str, int], ...]
"""(path, number of its counters), for each leaf that has others than its group."""

Home = Callable[[str], int]
"""path -> the number of the counters of its group."""

Row = TypeVar("Row", bound=Hashable)


class Parted(NamedTuple):
    """Which leaves share counters during and after an update with unused leaves."""

    apart: Apart
    sources: tuple[int, ...]  # of each counter that is new, the number of that which it goes on
    still: frozenset[int]  # the numbers of those that this update does not move


def parted(apart: Apart, unused: Collection[str], home: Home, size: int) -> Parted:
    """Return which leaves share counters in an update that leaves the `unused` leaves out.

    size: how many numbers are in use.

    Example:
        >>> parted((), ["a"], lambda path: 0, 1)
        Parted(apart=(('a', 1),), sources=(0,), still=frozenset({1}))
        >>> parted((("a", 1), ("b", 1)), ["a", "b"], lambda path: 0, 2)
        Parted(apart=(('a', 1), ('b', 1)), sources=(), still=frozenset({1}))
    """
    if not unused:
        return Parted(apart, (), frozenset())
    numbers, members = dict(apart), Counter(number for _, number in apart)
    left: dict[int, list[str]] = {}
    for path in sorted(unused):
        left.setdefault(numbers.get(path, home(path)), []).append(path)
    sources: list[int] = []
    still: set[int] = set()
    for number, paths in sorted(left.items()):
        if len(paths) == members[number]:  # all that are apart under this number
            still.add(number)
            continue
        still.add(size + len(sources))
        numbers |= dict.fromkeys(paths, size + len(sources))
        sources.append(number)
    return Parted(tuple(numbers.items()), tuple(sources), frozenset(still))


def settled(rows: Mapping[str, Row], home: Home, size: int) -> tuple[Apart, dict[int, Row]]:
    """Return (apart, {number: counters}), with equal counters of a group stored once.

    Leaves with the counters of most leaves of their group share the group's number.

    Args:
        rows: path -> all that is counted for a leaf.
        home: path -> the number of its group.
        size: how many groups there are.

    Example:
        >>> settled({"a": 3, "b": 3, "c": 1}, lambda path: 0, 1)
        ((('c', 1),), {0: 3, 1: 1})
    """
    paths: dict[int, dict[Row, list[str]]] = {}
    for path, row in rows.items():
        paths.setdefault(home(path), {}).setdefault(row, []).append(path)
    found: dict[int, Row] = {}
    numbers: dict[str, int] = {}
    for group, alike in sorted(paths.items()):
        most = max(alike, key=lambda row: len(alike[row]))
        found[group] = most
        for row, some in alike.items():
            if row != most:
                number = size + len(set(numbers.values()))
                found[number] = row
                numbers |= dict.fromkeys(some, number)
    return tuple(numbers.items()), found
