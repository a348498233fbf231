"""Facts about this machine: versions, backends, devices, environment variables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import textwrap
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

import fzero

REQUIRED = ("optree", "einops", "numpy", "typing_extensions")
BESIDE = ("matplotlib", "transformers", "accelerate", "deepspeed", "lightning", "triton")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# What is set of these changes how ranks find each other, wait, or compute.
VARIABLES = ("FZERO_", "NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES")


def environment() -> dict[str, Any]:
    """Return the report as plain JSON values; what is absent is null.

    Example:
        >>> environment()["torch"]["version"] == torch.__version__
        True
    """
    launched = dist.is_torchelastic_launched()
    return {
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "packages": {"fzero": fzero.__version__, **{name: _version(name) for name in REQUIRED}},
        "beside": {name: found for name in BESIDE if (found := _version(name))},
        "backends": _backends(),
        "cpu": {
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "nccl": _nccl(),
        "torchrun": {name: os.environ.get(name) for name in LAUNCHER} if launched else None,
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
    }


def report_text(report: dict[str, Any]) -> str:
    """Return `report` as one entry a fact, in a block of code that an issue takes as it is.

    Example:
        >>> found = {"cpu": {"cores": 2, "memory_bytes": 2**34}, "gpus": [], "nccl": None}
        >>> print(report_text(found))
        ```text
        cpu        cores 2, memory 16.0 GiB
        gpus       none
        nccl       none
        ```
    """
    lines = (
        textwrap.fill(f"{name:<10} {_words(value)}", 80, subsequent_indent=" " * 11)
        for name, value in report.items()
    )
    return "\n".join(["```text", *lines, "```"])


def show(*, as_json: bool) -> None:
    """Print the report."""
    report = environment()
    print(json.dumps(report, indent=2) if as_json else report_text(report))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(_fact(key, each) for key, each in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_words, value)) or "none"
    return "none" if value is None else str(value)


def _fact(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return f"memory {value / 2**30:.1f} GiB"
    return f"{name} {_words(value)}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> list[str]:
    found = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    return [name for name, is_there in found.items() if is_there]


def _nccl() -> str | None:
    there = dist.is_nccl_available() and torch.cuda.is_available()
    return ".".join(map(str, nccl.version())) if there else None


def _gpu(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": facts.total_memory,
    }
