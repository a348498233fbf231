"""Every notebook is stored with what it shows, and shows the same when it is run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.site.notebooks import NOTEBOOKS, TORCH, kernel, read, run, shown

TIER_INPUTS = ("notebooks",)  # tests/tiers.py: a push that changes them runs these tests

TABLES = {"01_one_step.ipynb": 1}  # that are shown as HTML, at least
PICTURES = {"07_property_testing.ipynb": 1}  # at least; the others have two
QUICK = {"01_one_step.ipynb", "02_hooks.ipynb"}  # `make nightly` runs the others again
WRITE = "run: python -m tests.site.notebooks"


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_a_notebook() -> None:
    assert "01_one_step.ipynb" in {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_valid_and_stored_with_its_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), WRITE  # run once, from top to bottom
    outputs = [out for cell in code(notebook) for out in cell.outputs]
    assert all(out.get("name") != "stderr" and out.output_type != "error" for out in outputs)
    shown = [set(out.get("data", {})) for out in outputs]
    assert sum("image/png" in kinds for kinds in shown) >= PICTURES.get(path.name, 2)
    assert sum("text/html" in kinds for kinds in shown) >= TABLES.get(path.name, 0)
    assert path.stat().st_size < 1_000_000


@pytest.fixture(scope="module")
def client() -> Iterator[NotebookClient]:
    """One kernel for all: to start one, with its imports, takes longer than most notebooks."""
    with kernel() as started:
        yield started


@pytest.mark.xdist_group("notebooks")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.name not in QUICK)) for path in NOTEBOOKS],
    ids=lambda path: path.name,
)
def test_it_runs_and_shows_what_is_stored(path: Path, client: NotebookClient) -> None:
    stored, notebook = read(path), read(path)
    run(client, notebook)
    # Another version of torch may call an operation by another name.
    words = stored.metadata[TORCH] == torch.__version__.partition("+")[0]
    for before, after in zip(code(stored), code(notebook), strict=True):
        assert shown(after, words=words) == shown(before, words=words), f"{after.source}\n{WRITE}"
