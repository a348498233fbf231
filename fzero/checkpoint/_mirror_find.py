"""Which update is whole, of the copies that all hosts have. Pure.

A copy is of one rank at one update. An update is whole if each of its ranks has a copy somewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fzero.checkpoint._mirror_file import Label


class HostCopy(NamedTuple):
    """A copy on a host."""

    host: str
    label: Label
    complete: int  # the update before it of which all copies were there
    nbytes: int


Update = tuple[str, int, int]
"""What copies of one update have in common: attempt, update, ranks."""


def whole_updates(copies: Sequence[HostCopy]) -> list[list[HostCopy]]:
    """Return the copies of each whole update, the newest update first.

    Example:
        >>> a, b = Label("a", 8, 0, 2), Label("a", 8, 1, 2)
        >>> here, there = HostCopy("x", a, 0, 99), HostCopy("y", b, 0, 99)
        >>> len(whole_updates([here])), len(whole_updates([here, there]))
        (0, 1)
    """
    updates: dict[Update, list[HostCopy]] = defaultdict(list)
    for one in sorted(copies):
        updates[one.label.attempt, one.label.update, one.label.ranks].append(one)
    newest = sorted(updates, key=lambda key: (key[1], key[0], key[2]), reverse=True)
    return [updates[key] for key in newest if not missing(updates[key])]


def missing(copies: Sequence[HostCopy]) -> list[int]:
    """Return the ranks of one update of which there is no copy."""
    there = {one.label.rank for one in copies}
    return [rank for rank in range(copies[0].label.ranks) if rank not in there]


def newest_of(copies: Sequence[HostCopy]) -> list[HostCopy]:
    """Return the copies of the newest update, whole or not."""
    last = max(copies, key=lambda one: (one.label.update, one.label.attempt)).label
    same = (last.attempt, last.update, last.ranks)
    return [one for one in copies if (one.label.attempt, one.label.update, one.label.ranks) == same]


def source_for(host: str, rank: int, copies: Sequence[HostCopy]) -> HostCopy:
    """Return the copy of a rank that a host reads: its own, or that of the first other host."""
    some = [one for one in copies if one.label.rank == rank]
    return next((one for one in some if one.host == host), some[0])
