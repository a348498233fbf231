"""What this machine can do, in two minutes: versions, ceilings, NCCL with 1 and 2 ranks, a step.

    python benchmarks/gpu/smoke.py --out benchmarks/results/gpu-run
    python benchmarks/gpu/smoke.py --device cpu
    python benchmarks/gpu/smoke.py --device sim      # the simulated one of tests/device: no times

Each check stands on its own: one that fails is a line of the table, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the modules of benchmarks/
sys.path.append(str(Path(__file__).parents[2]))  # for the device of tests/device

from ranks import load_sim, run_ranks, set_environment
from report import versions, write_report

from gpu.contestants import engine, functional
from gpu.model import Task


def machine(device: str) -> str:
    """What the rest was run on."""
    if device != "cuda":
        return versions()
    free, total = torch.cuda.mem_get_info()
    kind = torch.cuda.get_device_name()
    return f"{torch.cuda.device_count()} x {kind}, {free >> 30} of {total >> 30} GiB free"


def copy_rate(device: str) -> str:
    """Bytes read and written by a copy of 2 GiB (2 MiB without a GPU)."""
    source = torch.randn(2**29 if device == "cuda" else 2**19, device=device)
    target = torch.empty_like(source)
    return _told(
        lambda seconds: f"{2 * source.nbytes / seconds / 1e9:.0f} GB/s",
        lambda: target.copy_(source),
        device,
    )


def product_rate(device: str) -> str:
    """A bf16 matrix product of 8192 (256 without a GPU) on random data."""
    size = 8192 if device == "cuda" else 256
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return _told(
        lambda seconds: f"{2 * size**3 / seconds / 1e12:.1f} TFLOP/s", lambda: a @ b, device
    )


def collectives(device: str, world_size: int) -> str:
    """Check and time an all-gather, a reduce-scatter and an all-reduce of 4 KiB and of 32 MiB."""
    return run_ranks(_collectives, world_size, device, backend=_backend(device))


def _collectives(device: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for numel in (2**10, 2**23) if device == "cuda" else (2**10,):
        x = torch.full((numel,), float(rank + 1), device=device)
        part, total = x.new_empty(numel // size), float(size * (size + 1) / 2)
        whole = list(x.new_empty(size, numel).unbind())
        dist.all_reduce(y := x.clone())
        assert y[0].item() == y[-1].item() == total
        if device != "cpu":  # gloo has no reduce-scatter of its own
            dist.reduce_scatter(part, list(x.chunk(size)))
            assert part[0].item() == part[-1].item() == total
        dist.all_gather(whole, x)
        assert [row[-1].item() for row in whole] == [r + 1.0 for r in range(size)]
        ms = _told(lambda s: f"{1e3 * s:.2f} ms", lambda y=y: dist.all_reduce(y), device)
        found.append(f"all-reduce of {4 * numel >> 10} KiB {ms}")
    return ", ".join(found)


def steps(device: str, world_size: int) -> str:
    """Ten steps of a small GPT by both drivers at stages 0, 2 and 3; three on "sim"."""
    return run_ranks(_steps, world_size, device, backend=_backend(device))


def _steps(device: str) -> str:
    task = Task(
        layers=2,
        width=128,
        vocabulary=256,
        samples=2,
        tokens=64,
        precision="bf16",
        device=device,
    )
    found, count = [], 3 if device == "sim" else 10
    for name, build in (("engine", engine), ("functional", functional)):
        for stage in (0, 2, 3):
            built = build(task, stage=stage)
            losses = [built.step(task.batch(0, range(1))).item() for _ in range(count)]
            built.close()
            assert losses[-1] < losses[0], (name, stage, losses)
            found.append(f"{name} {stage}: {losses[0]:.3f} to {losses[-1]:.3f}")
    return ", ".join(found)


def _backend(device: str) -> str:
    return {"cuda": "nccl", "sim": "cpu:gloo,sim:simccl"}.get(device, "gloo")


def _told(say: Callable[[float], str], fn: Callable[[], object], device: str) -> str:
    """Say how long a call takes; of the simulated device, whose times mean nothing, that it ran."""
    seconds = _seconds(fn, device)
    return "ran" if device == "sim" else say(seconds)


def _seconds(fn: Callable[[], object], device: str) -> float:
    """Median-free and short: three calls to warm up, then the mean of ten."""
    for count in (3, 10):
        start = time.perf_counter()
        for _ in range(count):
            fn()
        if device == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / 10


def main() -> int:
    """Run every check; 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "sim"])
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    os.environ["FZERO_ONE_RANK_GROUP"] = "1"
    set_environment(1)
    if given.device == "sim":
        load_sim()
    checks: dict[str, Callable[[], Any]] = {
        "machine": lambda: machine(given.device),
        "copy": lambda: copy_rate(given.device),
        "bf16 product": lambda: product_rate(given.device),
    }
    for size in (1, 2):
        checks[f"collectives, {size} ranks"] = lambda n=size: collectives(given.device, n)
        checks[f"training, {size} ranks"] = lambda n=size: steps(given.device, n)
    lines, failed = ["| check | seconds | found |", "|---|---|---|"], 0
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            found = str(check())
        except Exception as error:
            failed += 1
            found = f"**FAILED** {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
            print(error, file=sys.stderr)
        seconds = "" if given.device == "sim" else f"{time.perf_counter() - start:.1f}"
        lines.append(f"| {name} | {seconds} | {found} |")
        print(lines[-1], flush=True)
    if given.out is not None:
        intro = "Versions, ceilings, and whether one and two ranks of this device run.\n"
        theme = "sim-smoke" if given.device == "sim" else "gpu-smoke"
        print(write_report(given.out, theme, lines, intro=intro, device=given.device))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
