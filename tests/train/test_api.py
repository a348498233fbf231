"""The job stands on what users have: names of `fzero`, and those that docs/reference shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fzero
from tests.test_imports import imported_modules

ROOT = Path(__file__).parents[2]
JOB = sorted((ROOT / "examples" / "train").glob("*.py"))


def inner_names(source: str) -> list[str]:
    """Return what a file imports of fzero that is neither a public name nor in docs/reference."""
    pages = (path.read_text() for path in (ROOT / "docs" / "reference").rglob("*.md"))
    public = set(re.findall(r"fzero(?:\.\w+)*", "\n".join(pages)))
    public |= {f"fzero.{name}" for name in fzero.__all__}
    found = {name for name in imported_modules(ast.parse(source), "example") if "fzero" in name}
    return sorted(name for name in found - {"fzero"} if name not in public)


@pytest.mark.parametrize("path", JOB, ids=lambda path: path.name)
def test_the_job_imports_public_names_only(path: Path) -> None:
    assert inner_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "inner"),
    [
        ("import fzero\nfrom fzero.checkpoint import save\nfrom fzero import LayoutError", []),
        ("from fzero.collectives import gather_objects", ["fzero.collectives.gather_objects"]),
        (
            "def f():\n    from fzero.checkpoint.folders import regular",
            ["fzero.checkpoint.folders.regular"],
        ),
        ("from fzero.ranks import rendezvous", ["fzero.ranks.rendezvous"]),
    ],
)
def test_the_check_sees(source: str, inner: list[str]) -> None:
    assert inner_names(source) == inner


def test_there_is_a_job_to_check() -> None:
    assert {"step.py", "train.py"} <= {path.name for path in JOB}
