"""docs/certify.md names every axis and value. (tests/test_docs.py runs its programs.)"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fzero.certify._axes import AXES

TEXT = (Path(__file__).parents[2] / "docs" / "certify.md").read_text()


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_it_names_every_axis_and_value(axis: Any) -> None:
    row = re.search(rf"^\| `{axis.name}` \|(.*)$", TEXT, re.MULTILINE)
    assert row is not None
    assert all(value.name in row.group(1) for value in axis.values)
