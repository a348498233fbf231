"""Save and load beside torch.distributed.checkpoint (DCP) and torch.save, in one process.

    python benchmarks/bench_checkpoint.py [result.json] [leaves ...]

All of them write the same bytes to one folder, and are called in turn, several times; the best of
each counts. fzero's checksums are made and looked at; DCP has none. torch.save is not on the disk
when it returns, the others are.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import fzero

ROUNDS, LEAVES, SIDE = 6, 24, 1184
GROUPS = (500, 1000, 2000, 4000)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _calls(folder: Path, leaves: int, *shape: int) -> dict[str, Callable[[], Any]]:
    params = {f"layer{i}": torch.randn(*shape) for i in range(leaves)}
    state = fzero.init(params, fzero.optim.adam(1e-3), stage=0)
    plain = {f"{name}.{kind}": x.clone() for name, x in params.items() for kind in "pmv"}
    into = {name: torch.empty_like(x) for name, x in plain.items()}
    paths = {name: folder / name for name in ("fzero", "dcp", "torch.pt")}
    return {
        "fzero save": lambda: fzero.checkpoint.save(paths["fzero"], state),
        "dcp save": lambda: dcp.save(plain, checkpoint_id=paths["dcp"], no_dist=True),
        "torch save": lambda: torch.save(plain, paths["torch.pt"]),
        "fzero load": lambda: fzero.checkpoint.load(paths["fzero"], state),
        "dcp load": lambda: dcp.load(into, checkpoint_id=paths["dcp"], no_dist=True),
        "torch load": lambda: torch.load(paths["torch.pt"]),
    }


def _best(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best[name], _seconds(call))
    return {name: round(seconds, 4) for name, seconds in best.items()}


def main() -> None:
    """Measure, print, and write the result file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": f"{os.cpu_count()} CPUs, shared with other work; load {os.getloadavg()}",
        "torch": torch.__version__,
        "bytes": LEAVES * SIDE * SIDE * 12,
        "rounds": ROUNDS,
    }
    with tempfile.TemporaryDirectory() as folder:
        found["seconds"] = _best(_calls(Path(folder), LEAVES, SIDE, SIDE), ROUNDS)
        print(found, flush=True)
    found["leaves"] = {}
    for leaves in [int(x) for x in sys.argv[2:]] or GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            found["leaves"][leaves] = _best(_calls(Path(folder), leaves, 100), 2)
    found["load at the end"] = os.getloadavg()
    text = json.dumps(found, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
