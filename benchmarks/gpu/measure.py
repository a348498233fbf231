"""What one rank does: build one contestant after the other, check it, time it, take its bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.contestants import Built, contestants
from gpu.model import Task

CHECKED = 5  # steps whose losses are compared; they also warm up
BLOCK = 20  # steps that one sync ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured: the task, who takes part, and how often."""

    task: Task
    names: Sequence[str]
    rounds: int  # steps that are timed one by one
    blocks: int  # blocks of 20 steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant in one pass: ms a step of the slowest rank, bytes of the fullest."""

    name: str
    losses: list[float]  # mean over ranks, of the first steps
    steps_ms: list[float]  # each between two syncs
    blocks_ms: list[float]  # a step of a block of 20 with one sync
    enqueued_ms: list[float]  # the same, when the host was done and the device perhaps not
    resident_bytes: int  # after a step; 0 on a CPU
    peak_bytes: int  # in a step


def measure(plan: Plan) -> tuple[list[Row], dict[str, str]]:
    """Measure everyone once; returns the rows, and why others have none. Runs on every rank.

    An error leaves its contestant out; at several ranks it ends the program, since the ranks may
    no longer agree about what comes next.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    build = contestants(size)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name in plan.names:
        start = time.perf_counter()
        try:
            rows.append(_row(name, plan, build[name]))
        except Exception as error:
            error.add_note(f"This was contestant {name}, on rank {rank}.")
            if size > 1:
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        _free()
        if rank == 0:
            seconds = time.perf_counter() - start
            print(f"{name}: {failed.get(name, 'measured')} after {seconds:.1f} s", flush=True)
    return rows, failed


def _row(name: str, plan: Plan, build: Callable[[Task], Built]) -> Row:
    task, on_gpu = plan.task, plan.task.device == "cuda"
    rank, size = dist.get_rank(), dist.get_world_size()
    # Plain PyTorch at several ranks is the reference: every rank trains on the data of all.
    ranks = range(size) if name == "plain" else range(rank, rank + 1)
    batches = [task.batch(number, ranks) for number in range(CHECKED)]
    before = torch.cuda.memory_allocated() if on_gpu else 0
    built = build(task)
    losses = torch.stack([built.step(batch) for batch in batches]).double()
    dist.all_reduce(losses)
    resident = peak = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated() - before
        built.step(batches[0])
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    steps = [_timed(built, batches, 1, on_gpu) for _ in range(plan.rounds)]
    blocks = [_timed(built, batches, BLOCK, on_gpu) for _ in range(plan.blocks)]
    built.close()
    times = _slowest([*[total for total, _ in steps], *[x for pair in blocks for x in pair]], task)
    resident, peak = map(int, _slowest([resident, peak], task))
    return Row(
        name=name,
        losses=(losses / size).tolist(),
        steps_ms=times[: plan.rounds],
        blocks_ms=times[plan.rounds :: 2],
        enqueued_ms=times[plan.rounds + 1 :: 2],
        resident_bytes=resident,
        peak_bytes=peak,
    )


def _timed(built: Built, batches: Sequence[Tensor], steps: int, on_gpu: bool) -> tuple[float, ...]:
    """Milliseconds a step: until all is done, and until the host is done."""
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(steps):
        built.step(batches[number % len(batches)])
    enqueued = time.perf_counter()
    if on_gpu:
        torch.cuda.synchronize()
    end = time.perf_counter()
    return 1e3 * (end - start) / steps, 1e3 * (enqueued - start) / steps


def _slowest(values: Sequence[float], task: Task) -> list[float]:
    all_ranks = torch.tensor(values, dtype=torch.float64, device=task.device)
    dist.all_reduce(all_ranks, op=dist.ReduceOp.MAX)
    return all_ranks.tolist()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
