"""Which rank owns which parameter, and which are exchanged together: pure functions of sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fzero.state.layout import Leaf

BATCH_NUMEL = 2**23
"""Elements that a rank gets whole at once, unless a parameter alone is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedLeaf:
    """A parameter whose update is computed whole, by one rank."""

    leaf: Leaf
    index: int  # of the leaf in the layout
    position: int  # of its flat, among those that learn
    offset: int  # of its first element in the full flat
    owner: int  # a rank of the axis over which flats are cut


def cost_of(shape: Sequence[int]) -> int:
    """Return what a Newton-Schulz iteration costs: min^2 max, of a parameter as a matrix.

    Example:
        >>> cost_of((3, 2, 2)), cost_of((5,))
        (36, 5)
    """
    rows, columns = (shape[0], prod(shape[1:])) if shape else (1, 1)
    return min(rows, columns) ** 2 * max(rows, columns)


def assign(costs: Sequence[int], ranks: int, kept: Sequence[int] = ()) -> list[int]:
    """Return the owner of each parameter: the largest first, to the rank that has least.

    What a rank has is the larger of its shares of all that is computed and of all that is kept.
    Without `kept` no rank computes more than the mean and (1 - 1 / ranks) of the largest cost.

    Args:
        costs: what the update of each parameter costs.
        ranks: how many there are.
        kept: elements that its owner keeps of each parameter; () for none.

    Example:
        >>> assign([4, 9, 5], 2)
        [1, 0, 1]
        >>> assign([4, 4, 4, 4], 2, [9, 9, 1, 1]), assign([9, 9, 1, 1], 2, [4, 4, 4, 4])
        ([0, 1, 0, 1], [0, 1, 0, 1])
    """
    kept = kept or [0] * len(costs)
    # As whole numbers: shares of two sums, times both sums.
    computed, held = sum(costs) or 1, sum(kept) or 1
    sizes = [(c * held, k * computed) for c, k in zip(costs, kept, strict=True)]
    load, owners = [(0, 0)] * ranks, [0] * len(costs)

    def with_one(rank: int, i: int) -> tuple[int, int]:
        return load[rank][0] + sizes[i][0], load[rank][1] + sizes[i][1]

    for i in sorted(range(len(costs)), key=lambda i: (-max(sizes[i]), -sum(sizes[i]))):
        owners[i] = min(range(ranks), key=lambda rank: (max(with_one(rank, i)), sum(load[rank])))
        load[owners[i]] = with_one(owners[i], i)
    return owners


def nearest(
    owners: Sequence[int], places: Sequence[tuple[int, int, int]], parts: Sequence[int]
) -> list[int]:
    """Return the owners with all ranks moved on by one number, so that they hold the most.

    Over all such numbers they hold 1 / W of the elements, in the mean: at the best one no less. So
    at most (W - 1) / W of the elements cross ranks to their owners.

    Args:
        owners: of each parameter.
        places: of each: where it begins in its flat, its elements, those of a part of the flat.
        parts: which part each rank has; () if each has everything.

    Example:
        >>> nearest([0, 1], [(0, 4, 4), (4, 4, 4)], [1, 0])  # rank 0 has the second part
        [1, 0]
    """
    held, rank_of = [0] * (len(parts) or 1), {part: rank for rank, part in enumerate(parts)}
    for owner, (offset, numel, length) in zip(owners, places, strict=True) if parts else ():
        for part in range(offset // length, (offset + numel - 1) // length + 1):
            here = min(offset + numel, (part + 1) * length) - max(offset, part * length)
            held[(rank_of[part] - owner) % len(parts)] += here
    on = held.index(max(held))
    return [(owner + on) % len(parts) if parts else owner for owner in owners]


def batches_of(leaves: Sequence[OwnedLeaf], ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield batches in which every owner has something to compute, as long as it can."""
    left = [[k for k, one in enumerate(leaves) if one.owner == rank] for rank in range(ranks)]
    batch: list[int] = []
    held = [0] * ranks
    for turn in range(max(map(len, left), default=0)):
        taken = [(rank, own[turn]) for rank, own in enumerate(left) if turn < len(own)]
        if batch and any(held[r] + leaves[k].leaf.numel > BATCH_NUMEL for r, k in taken):
            yield tuple(sorted(batch))
            batch, held = [], [0] * ranks
        for rank, k in taken:
            batch.append(k)
            held[rank] += leaves[k].leaf.numel
    if batch:
        yield tuple(sorted(batch))
