"""Run the notebooks and store their outputs: a Git host shows them as they are in the files.

python -m tests.site.notebooks [notebooks/01_one_step.ipynb ...]      all, or some
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import torch
from nbclient import NotebookClient

from tests.rank_process import LOOPBACK

TORCH = "torch"  # in the metadata of a notebook: the version that its outputs are of
FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Between two runs, machines and versions of torch these differ: numbers, lengths of rules and
# paddings. Addresses and names of temporary files are numbers with letters.
_VARIES = re.compile(r"0x[0-9a-f]+|/tmp/\S+|[-+]?\d[\d,.]*(?:e[-+]?\d+)?|[-\u2500=]{2,}")


def read(path: Path) -> Any:
    """Return a notebook."""
    return nbformat.read(path, as_version=4)


@contextmanager
def kernel() -> Iterator[NotebookClient]:
    """Start a kernel, in which `run` runs notebooks one after another."""
    client = NotebookClient(
        nbformat.v4.new_notebook(), timeout=300, kernel_name="python3", record_timing=False
    )
    client.resources = {"metadata": {"path": str(FOLDER)}}
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK  # for what a notebook starts by torchrun
    try:
        with client.setup_kernel():
            yield client
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(client: NotebookClient, notebook: Any) -> None:
    """Execute the cells of a notebook, in names of its own; outputs and counts are put into it.

    Raises the error of a cell that fails, with its source.
    """
    reset = nbformat.v4.new_code_cell("%reset -f")  # the names of the notebook before
    notebook.cells.insert(0, reset)
    client.nb = notebook
    for number, cell in enumerate(notebook.cells):
        client.execute_cell(cell, number)
    notebook.cells.remove(reset)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        cell.execution_count = number
        cell.outputs = _merged(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number


def _merged(outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a cell, with several writes to one stream as one."""
    merged: list[Any] = []
    for output in outputs:
        last = merged[-1] if merged else {}
        streams = output.output_type == last.get("output_type") == "stream"
        if streams and output.name == last["name"]:
            last["text"] += output.text
        else:
            merged.append(output)
    return merged


def shown(cell: Any, *, words: bool = True) -> list[Any]:
    """Return what a cell shows, less what varies: the kinds, and the words of texts."""
    return [
        (_words(output.text) if words else output.name)
        if output.output_type == "stream"
        else {
            kind: words and not kind.startswith("image/") and _words(text)
            for kind, text in sorted(output.get("data", {}).items())
        }
        for output in cell.outputs
    ]


def _words(text: Any) -> str:
    return " ".join(_VARIES.sub(" ", text).split()) if isinstance(text, str) else ""


def main(paths: Sequence[Path]) -> None:
    """Run these notebooks, and write them with what they show."""
    with kernel() as client:
        for path in paths:
            notebook = read(path)
            run(client, notebook)
            notebook.metadata[TORCH] = torch.__version__.partition("+")[0]
            nbformat.write(notebook, path)
            print(path, flush=True)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or NOTEBOOKS)
