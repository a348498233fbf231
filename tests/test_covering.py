"""What a push runs of a product has every value, or pair, of its arguments; the night runs all."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import conftest, tiers
from tests.covering import few, rows

axes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
strengths = st.integers(1, 3)


def parts(cases: Any, strength: int) -> set[Any]:
    found = set()
    for case in cases:
        found |= {*itertools.combinations(enumerate(case), min(strength, len(case)))}
    return found


@given(axes, strengths)
def test_rows_have_all_combinations_of_so_many_values(sizes: list[int], strength: int) -> None:
    values: dict[str, Any] = {f"axis {i}": range(size) for i, size in enumerate(sizes)}
    product = [*itertools.product(*values.values())]
    chosen = rows(values, strength)
    assert parts(chosen, strength) == parts(product, strength)
    assert len(chosen) == len({*chosen}) <= len(product)
    if strength >= len(sizes):
        assert {*chosen} == {*product}


@given(axes, strengths, st.randoms())
def test_few_cases_have_what_all_of_them_have(sizes: list[int], strength: int, random: Any) -> None:
    """Of any part of a product: some of its cases may be slow for another reason."""
    product = [*itertools.product(*map(range, sizes))]
    some = [case for case in product if random.random() < 0.7] or product
    chosen = few([{str(i): value for i, value in enumerate(case)} for case in some], strength)
    assert parts([some[i] for i in chosen], strength) == parts(some, strength)
    assert len({*chosen}) == len(chosen)
    if strength == 1 and some == product:
        assert len(chosen) == max(sizes)


class Slow:
    """A plugin that looks at the items when they have been thinned out."""

    names: tuple[str, ...] = ()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.names = tuple(x.name for x in items)


SOURCE = """
import pytest
from tests.covering import covered

@pytest.mark.parametrize("x, y", [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("z", "ab")
def test_a(x, y, z): pass

@covered(x=[1, 2, 3], y=[4, 5])
def test_b(x, y): pass

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("y", [1, 2])
def test_c(x, y): pass
"""


@pytest.mark.parametrize(
    ("marks", "counts"),
    [("not slow", (3, 3, 2)), ("slow or not slow", (6, 6, 4))],
)
def test_a_push_runs_a_few_cases_and_the_night_all(
    marks: str, counts: tuple[int, int, int], tmp_path: Any
) -> None:
    file, seen = tmp_path / "test_source.py", Slow()
    file.write_text(SOURCE)
    plugins: list[Any] = [seen, conftest]
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", marks, "--no-header"]
    assert pytest.main([str(file), *options, "-c", "pyproject.toml"], plugins=plugins) == 0
    found = tuple(sum(name.startswith(f"test_{x}") for name in seen.names) for x in "abc")
    assert found == counts


def test_what_takes_long_waits_unless_its_inputs_have_changed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight cases of 0.2 s three run, of long ones none; what is new, or marked, runs."""
    seen, costs = Slow(), tmp_path / "costs.json"
    took = {"short": [8, 0.2], "long": [8, 5.0], "grown": [7, 5.0], "marked": [8, 5.0]}
    eight = '@pytest.mark.parametrize("x", range(8))\n'
    source = (
        "import pytest\nTIER_INPUTS = {inputs}\n"
        f"{eight}def test_short(x): pass\n{eight}def test_long(x): pass\n"
        f"{eight}def test_grown(x): pass\n{eight}@pytest.mark.smoke\ndef test_marked(x): pass\n"
    )

    def found(name: str, **inputs: str) -> tuple[int, ...]:
        file = tmp_path / f"test_{name}.py"
        file.write_text(source.format(inputs=[*inputs]))
        functions = {f"{file.name}::test_{function}": value for function, value in took.items()}
        costs.write_text(json.dumps({"functions": functions, "inputs": inputs}))
        options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--no-header"]
        options += ["-c", "pyproject.toml", f"--rootdir={tmp_path}", "-m", "not slow"]
        assert pytest.main([str(file), *options], plugins=[seen, conftest]) == 0
        return tuple(sum(n.startswith(f"test_{x}") for n in seen.names) for x in took)

    monkeypatch.setattr(tiers, "COSTS", costs)
    assert found("plain") == (3, 0, 8, 8)
    assert found("read", tests="another") == (8, 8, 8, 8)
    assert found("again", docs=tiers.digest("docs")) == (3, 0, 8, 8)
