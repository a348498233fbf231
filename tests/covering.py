"""A few rows of a product of options, in which every pair of values, or every triple, occurs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rows(axes: dict[str, Sequence[Any]], strength: int = 2) -> list[tuple[Any, ...]]:
    """Rows of one value for each axis: any `strength` axes have all their combinations in them.

    Greedy: the next row is the one of the product that has most of what is missing.
    """

    def parts(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return {*itertools.combinations(enumerate(row), min(strength, len(axes)))}

    product = list(itertools.product(*(range(len(values)) for values in axes.values())))
    missing = set().union(*map(parts, product))
    chosen = []
    while missing:
        best = max(product, key=lambda row: len(parts(row) & missing))
        chosen.append(best)
        missing -= parts(best)
    return [tuple(v[i] for v, i in zip(axes.values(), row, strict=True)) for row in chosen]


def covered(strength: int = 2, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by such rows of the values of its arguments."""
    return pytest.mark.parametrize(tuple(axes), rows(axes, strength))
