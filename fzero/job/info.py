"""What this machine has: versions, backends, cores, GPUs, and whether a launcher started us."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

import fzero

PACKAGES = ("optree", "einops", "numpy", "matplotlib", "tqdm")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")


def environment() -> dict[str, Any]:
    """Return the report as plain JSON values; what is absent is null.

    Example:
        >>> environment()["torch"]["version"] == torch.__version__
        True
    """
    return {
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "packages": {"fzero": fzero.__version__, **{name: _version(name) for name in PACKAGES}},
        "backends": _backends(),
        "cpu": {"cores": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "nccl": _nccl(),
        "torchrun": {name: os.environ.get(name) for name in LAUNCHER} if _launched() else None,
    }


def as_text(report: dict[str, Any]) -> str:
    """Return `report` as one line a fact, for people.

    Example:
        >>> print(as_text({"cpu": {"cores": 2, "torch_threads": 1}, "gpus": [], "nccl": None}))
        cpu        cores 2, torch_threads 1
        gpus       none
        nccl       none
    """
    return "\n".join(f"{name:<10} {_words(value)}" for name, value in report.items())


def show(*, as_json: bool) -> None:
    """Print the report."""
    report = environment()
    print(json.dumps(report, indent=2) if as_json else as_text(report))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_words, value)) or "none"
    return "none" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _launched() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, is_there in found.items() if is_there]


def _nccl() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(map(str, nccl.version()))


def _gpu(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    return {"name": facts.name, "memory_bytes": facts.total_memory}
