"""Every notebook runs from top to bottom, is valid, and is stored without outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.rank_process import LOOPBACK

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TABLES = {"01_one_step.ipynb": 3, "02_hooks.ipynb": 3}  # that are shown as HTML, at least


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_is_a_notebook() -> None:
    assert "01_one_step.ipynb" in {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_valid_and_stored_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.fixture(scope="module")
def client() -> Iterator[NotebookClient]:
    """One kernel for all: to start one, with its imports, takes longer than most notebooks."""
    made = NotebookClient(nbformat.v4.new_notebook(), timeout=150, kernel_name="python3")
    made.resources = {"metadata": {"path": str(FOLDER)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)  # for what a notebook starts by torchrun
        with made.setup_kernel():
            yield made


@pytest.mark.xdist_group("notebooks")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs(path: Path, client: NotebookClient) -> None:
    client.nb = notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # names of the one before
    for number, cell in enumerate(notebook.cells):
        client.execute_cell(cell, number)  # raises the error of one that fails, with its source
    shown = [set(out.get("data", {})) for cell in notebook.cells for out in cell.get("outputs", [])]
    assert sum("image/png" in kinds for kinds in shown) >= 2  # the figures are really drawn
    assert sum("text/html" in kinds for kinds in shown) >= TABLES.get(path.name, 0)
