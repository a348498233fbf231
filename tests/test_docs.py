"""The documents' blocks of Python run: those of one document are one program, in their order."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import spawn_script
from tests.site.pictures import STORED

ROOT = Path(__file__).parent.parent
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
DOCUMENTS = [ROOT / "README.md", *sorted(PAGES)]
# Pages on libraries that take seconds to import, or start a process group: a process each.
APART = {
    "huggingface.md": ("accelerate", "peft", "transformers"),
    "fabric.md": ("lightning_fabric",),
}
# Those that take seconds; the tests of what they show run in `make test`.
LONG = {
    *("certify.md", "diff.md", "fabric.md", "huggingface.md", "pictures.md", "plan.md", "prove.md"),
    *("trace.md", "troubleshooting.md"),
}
DRAW = "run: python -m tests.site.pictures"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.name in LONG)) for path in DOCUMENTS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    if path.name in APART:
        run_apart(blocks, APART[path.name], tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": f"document_{path.stem}"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)
    if path.name == "pictures.md":
        drawn = {picture.name for picture in tmp_path.glob("*.png")}
        assert drawn == {picture.name for picture in STORED.glob("*.png")}, DRAW
        assert drawn == set(re.findall(r"\]\(_static/pictures/(\S+)\)", path.read_text())), DRAW


def run_apart(blocks: list[str], needs: tuple[str, ...], folder: Path) -> None:
    for name in needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    command = [sys.executable, "-c", "\n".join(blocks)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_quickstart_is_a_script_for_torchrun(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"))[:3]
    script = tmp_path / "train.py"
    script.write_text("\n".join([*blocks, "print(f'loss {losses[-1]:.9f}\\n', end='')\n"]))
    done = spawn_script(script, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"loss ([\d.]+)", done.stdout)
    assert len(told) == 2 and len(set(told)) == 1  # the mean over ranks, on both


def test_there_are_blocks_to_run() -> None:
    assert sum(len(BLOCK.findall(path.read_text(encoding="utf-8"))) for path in DOCUMENTS) >= 40
