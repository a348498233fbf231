"""The documents' blocks of Python run: those of one document are one program, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": f"document_{path.stem}"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)


def test_there_are_blocks_to_run() -> None:
    assert sum(len(BLOCK.findall(path.read_text(encoding="utf-8"))) for path in DOCUMENTS) >= 7
