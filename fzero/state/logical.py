"""Logical ranks: those that a run is written for, whatever number of ranks carries them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.errors import LayoutError


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
