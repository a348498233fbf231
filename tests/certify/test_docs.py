"""docs/certify.md: its programs run, and it names every axis and value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fzero.certify._axes import AXES

TEXT = (Path(__file__).parents[2] / "docs" / "certify.md").read_text()


def test_its_programs_run_and_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(program, names)
    told = capsys.readouterr().out
    assert "give the step of one process" in told
    assert re.search(r"gradient: update 1, rank 0, 0.weight\[\d+, \d+\]: \S+ and not", told)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_it_names_every_axis_and_value(axis: Any) -> None:
    row = re.search(rf"^\| `{axis.name}` \|(.*)$", TEXT, re.MULTILINE)
    assert row is not None
    assert all(value.name in row.group(1) for value in axis.values)
