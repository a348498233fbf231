"""Small runs of the job, for its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
from torch import Tensor

from fzero.checkpoint import load
from fzero.state import NAMESPACE
from train.saving import find_checkpoint, read_facts
from train.settings import resolve
from train.step import make_job, make_optimizer

SMALL = {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "context": 16,
    "text_mb": 0.1,
    "steps": 6,
    "warmup": 2,
    "sample_bytes": 0,
    "plot": False,
    "quiet": True,
}


ARGS = [  # the same for the command line
    "--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--text-mb", "0.1",
    "--warmup", "2", "--sample-bytes", "0", "--no-plot",
]  # fmt: skip


def small(out: Path, **more: Any) -> dict[str, Any]:
    """Return options of a run of a second or two, as the command line gives them."""
    return {**SMALL, "out": out, **more}


def saved_state(out: Path) -> Any:
    """Return the newest state under `out`, as one rank sees it."""
    folder = find_checkpoint(out)
    settings = resolve({}, read_facts(folder)["settings"])
    job, params = make_job(settings)
    return load(folder, job.step.init(params, make_optimizer(settings)))


def saved_tensors(out: Path) -> list[Tensor]:
    """Return all tensors of the newest state: parameters, moments, masters, counters."""
    return optree.tree_leaves(saved_state(out), namespace=NAMESPACE)


def saved_losses(out: Path) -> list[float]:
    """Return the losses of steps 1, 2, ... of the newest checkpoint."""
    return read_facts(find_checkpoint(out))["losses"]
