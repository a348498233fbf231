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


def hardware(device: str = "cpu") -> str:
    """The GPU, or cores and processor, short enough for a file name: `2core-amd-epyc-9r14`."""
    if device == "cuda":
        return "-".join(torch.cuda.get_device_name().lower().split())
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
    if torch.cuda.is_available():
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for package in ("deepspeed", "optree"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def write_report(
    folder: Path, theme: str, tables: Sequence[str], *, intro: str, device: str = "cpu"
) -> Path:
    """Write `<theme>_<hardware>_<date>.md`, replacing one of the same day.

    Args:
        folder: made if it is not there.
        theme: what was measured.
        tables: Markdown, in order.
        intro: what the columns mean.
        device: "cuda" names the file after the GPU.

    Returns:
        The path of the file.
    """
    date = datetime.date.today().isoformat()
    machine = hardware(device)
    path = folder / f"{theme}_{machine}_{date}.md"
    script = Path(sys.argv[0]).resolve()
    inside = script.relative_to(Path(__file__).resolve().parent)
    command = shlex.join(["python", f"benchmarks/{inside}", *sys.argv[1:]])
    load = " / ".join(f"{value:.1f}" for value in os.getloadavg())
    head = (
        f"# {theme}, {machine}, {date}\n\n    {command}\n\n{versions()}; "
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}, "
        f"MALLOC_TRIM_THRESHOLD_={os.environ.get('MALLOC_TRIM_THRESHOLD_', 'default')}; "
        f"load average at the end {load}.\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, intro, *tables]))
    return path
