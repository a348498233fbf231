"""Covering arrays: few rows of a product with every combination of `strength` values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Combination = tuple[tuple[int, int], ...]  # (axis, value), ascending by axis


def covering(sizes: Sequence[int], strength: int) -> list[tuple[int, ...]]:
    """Return rows of value indices that have each combination of `strength` axes' values.

    Greedy: a row begins with a combination that is missing, and gets on each other axis the value
    that covers most of what is missing. With strength = len(sizes) it is the product.

    Args:
        sizes: how many values each axis has.
        strength: on how many axes together, at least 1.

    Source: Cohen et al., "The AETG System: An Approach to Testing Based on Combinatorial Design",
    IEEE TSE 23(7), 1997, section 3.

    Example:
        >>> rows = covering((2, 2, 2), 2)
        >>> len(rows), len({(a, b) for a, b, _ in rows})
        (4, 4)
    """
    strength = min(strength, len(sizes))
    missing: dict[Combination, None] = {}  # ordered: the rows are the same every time
    for axes in itertools.combinations(range(len(sizes)), strength):
        for values in itertools.product(*(range(sizes[axis]) for axis in axes)):
            missing[tuple(zip(axes, values, strict=True))] = None
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in sorted(set(range(len(sizes))) - row.keys(), key=lambda a: -sizes[a]):
            gains = [_gain(row, axis, value, strength, missing) for value in range(sizes[axis])]
            ties = [value for value, gain in enumerate(gains) if gain == max(gains)]
            row[axis] = ties[len(rows) % len(ties)]  # in turn, so that no value is in most rows
        whole = tuple(row[axis] for axis in range(len(sizes)))
        rows.append(whole)
        for axes in itertools.combinations(range(len(sizes)), strength):
            missing.pop(tuple((axis, whole[axis]) for axis in axes), None)
    return sorted(rows)


def _gain(
    row: dict[int, int], axis: int, value: int, strength: int, missing: dict[Combination, None]
) -> int:
    """Return how many missing combinations this value adds to the row."""
    return sum(
        tuple(sorted([*((other, row[other]) for other in others), (axis, value)])) in missing
        for others in itertools.combinations(sorted(row), strength - 1)
    )
