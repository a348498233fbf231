"""A few rows of a product of options, in which every value, or every pair of values, occurs.

`covered` makes these rows alone. `pytest.mark.sparse` is for a law that is cheap to state for a
whole product: `make test` runs rows of it, `make nightly` the product.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
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


def thin_out(items: Sequence[pytest.Item]) -> None:
    """Mark cases of `sparse` tests as slow: what is left has every value, or pair, of arguments.

    @pytest.mark.sparse(2) asks for every pair of values of two arguments, plain `sparse` for every
    value. Cases that are slow anyway stay so.
    """
    tests: dict[tuple[object, str], list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sparse") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function) and hasattr(item, "callspec"), item.nodeid
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sparse")
        chosen = few([*map(arguments, cases)], *mark.args)
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker(pytest.mark.slow)


def arguments(case: pytest.Function) -> dict[str, Any]:
    """What each `parametrize` gave a case, compared by identity: values need no hash.

    Arguments of one `parametrize` are one axis, unless they are of `covered`.
    """
    params = case.callspec.params
    names = (mark.args[0] for mark in case.iter_markers("parametrize"))
    axes: list[Sequence[str]] = []
    for given in names:
        together = given.split(",") if isinstance(given, str) else given
        axes += [(name,) for name in given] if isinstance(given, Axes) else [together]
    return {str(axis): tuple(id(params[name.strip()]) for name in axis) for axis in axes}


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
