"""Write a result file: what was run, on what, with which versions, and the tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def hardware() -> str:
    """Cores and processor, short enough for a file name: `2core-amd-epyc-9r14`."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":")[1] if models else name
    words = "".join(char.lower() if char.isalnum() else " " for char in name).split()
    return f"{os.cpu_count()}core-" + "-".join(words[:3])


def versions() -> str:
    """Versions of everything that was compared, in one line."""
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("deepspeed", "optree"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def write_report(folder: Path, theme: str, tables: Sequence[str], *, intro: str) -> Path:
    """Write `<theme>_<hardware>_<date>.md`, replacing one of the same day.

    Args:
        folder: made if it is not there.
        theme: what was measured.
        tables: Markdown, in order.
        intro: what the columns mean.

    Returns:
        The path of the file.
    """
    date = datetime.date.today().isoformat()
    path = folder / f"{theme}_{hardware()}_{date}.md"
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    load = " / ".join(f"{value:.1f}" for value in os.getloadavg())
    head = (
        f"# {theme}, {hardware()}, {date}\n\n    {command}\n\n{versions()}; "
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}; load average at the end {load}.\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, intro, *tables]))
    return path
