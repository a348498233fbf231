"""A few rows of a product of options, in which every value, or every pair of values, occurs.

`covered` makes these rows alone; of the cases of any other product tests/tiers.py chooses by `few`
what `make test` runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
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


class Axes(tuple[str, ...]):
    """Names of arguments that `covered` has values for, each an axis of its own."""


def covered(strength: int = 2, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by such rows of the values of its arguments."""
    return pytest.mark.parametrize(Axes(axes), rows(axes, strength))


def few(cases: Sequence[dict[str, Any]], strength: int = 1) -> list[int]:
    """The numbers of some cases, in which all values occur, or all pairs, that occur in any.

    Greedy: the next case has most of what is missing, then values that were seldom chosen.
    """
    parts = [
        {*itertools.combinations(sorted(case.items()), min(strength, len(case)))} for case in cases
    ]
    missing, times = set().union(*parts), Counter[Any]()
    chosen: list[int] = []
    while missing:
        best = max(
            range(len(cases)),
            key=lambda i: (len(parts[i] & missing), -sum(times[x] for x in cases[i].items()), -i),
        )
        chosen.append(best)
        missing -= parts[best]
        times.update(cases[best].items())
    return chosen
