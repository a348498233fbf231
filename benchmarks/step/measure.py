"""What one rank does: build every contestant, check it, time it, count it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from ranks import interleave
from torch.distributed.device_mesh import init_device_mesh

from step.adapter_contestants import adapter_contestants
from step.apart import BURST, Turn, Turns, alone
from step.contestants import Contestant, Setup, Step, adamw, torch_contestants
from step.count import CollectiveCounter, Memory, Traffic, loopback_bytes, measure_memory
from step.deepspeed_contestants import deepspeed_contestants, is_installed
from step.fzero_contestants import fzero_contestants
from step.models import Batch, Task, make_task

CHECKED_STEPS = 5
_MEMORY_STEPS = 2  # taken while memory is measured, before the clock is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One table: a model, a world, a number of backward calls, and how long to measure."""

    model: str
    world_size: int
    backwards: int
    rounds: int
    warmup: int
    names: tuple[str, ...]  # contestants to take; all of them if empty
    turn: Turn | None = None  # of the one contestant in these processes; None: all are in them

    @property
    def steps(self) -> int:
        """Optimizer steps of every contestant, the counted one included."""
        return (
            _MEMORY_STEPS + self.warmup + self.rounds * (1 if self.turn is None else 1 + BURST) + 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one contestant; bytes are those of the fullest rank."""

    contestant: str
    stage: str
    once: bool
    times_ms: list[float]  # of the slowest rank, one per round
    traffic: list[Traffic]
    loopback_bytes: int | None  # of all ranks, in one step
    memory: Memory
    losses: list[float]  # mean over ranks, of the first `CHECKED_STEPS` steps


class Runner:
    """A contestant that walks through its batches, one optimizer step at each call."""

    def __init__(self, step: Step, batches: Sequence[list[Batch]]) -> None:
        """Take the step and what it will be fed."""
        self._step = step
        self._batches = batches
        self.losses: list[float] = []

    def __call__(self) -> None:
        """Take the next step. Its loss is kept as a number, as loops do that log it."""
        # A tensor would lie between two large buffers of the heap, which could not be joined then.
        self.losses.append(self._step(self._batches[len(self.losses)]).item())


def find_contestants(task: Task, names: Sequence[str]) -> tuple[list[Contestant], list[str]]:
    """The contestants to run, in the order of the table, and why others are left out.

    Raises:
        ValueError: a name that no contestant has, whatever the number of backward calls.
    """
    known = [item.name for n in (1, 2) for item in _everyone(replace(task, backwards=n))]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"no contestant is called {', '.join(unknown)}.\n"
            f"Fix: choose from {', '.join(dict.fromkeys(known))}."
        )
    chosen = [item for item in _everyone(task) if not names or item.name in names]
    missing = [item.name for item in chosen if item.name.startswith("ds")]
    if is_installed() or not missing:
        return chosen, []
    reason = f"{', '.join(missing)}: deepspeed is not installed (pip install 'fzero[bench]')"
    return [item for item in chosen if item.name not in missing], [reason]


def _everyone(task: Task) -> list[Contestant]:
    ours = [*fzero_contestants(task), *adapter_contestants(task)]
    return [*torch_contestants(task), *deepspeed_contestants(task), *ours]


def reference_losses(task: Task, world_size: int) -> list[float]:
    """One process, one model, the batches of all ranks: the losses everyone must have."""
    module = task.module()
    optimizer = adamw(module.parameters())
    losses: list[float] = []
    for step in range(CHECKED_STEPS):
        total = 0.0
        for rank in range(world_size):
            for x, y in task.batches(step=step, rank=rank):
                loss = module(x, y) / (task.backwards * world_size)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _build(contestant: Contestant, setup: Setup, steps: int) -> tuple[Runner, Memory]:
    rank = dist.get_rank()
    batches = [setup.task.batches(step=step, rank=rank) for step in range(steps)]

    def build() -> Runner:
        return Runner(contestant.build(setup), batches)

    start = time.perf_counter()
    try:
        runner, memory = measure_memory(build, lambda runner: runner())
    except Exception as error:
        error.add_note(f"This was contestant {contestant.name}, on rank {rank}.")
        raise
    if rank == 0:
        print(f"  built {contestant.name} in {time.perf_counter() - start:.1f} s", flush=True)
    return runner, _fullest(memory)


def _count(runner: Runner) -> tuple[list[Traffic], int | None]:
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    with CollectiveCounter() as counter:
        runner()
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    moved = None if before is None or after is None else after - before
    return counter.traffic(), moved


def _mean_losses(runner: Runner) -> list[float]:
    losses = torch.tensor(runner.losses[:CHECKED_STEPS], dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def _fullest(memory: Memory) -> Memory:
    both = torch.tensor([memory.resident_bytes, memory.peak_bytes])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    resident_bytes, peak_bytes = both.tolist()
    return Memory(resident_bytes=resident_bytes, peak_bytes=peak_bytes)


def measure(plan: Plan) -> tuple[list[Row], list[float], list[str]]:
    """Measure one table; runs on every rank.

    Returns:
        The rows, the reference losses (computed on rank 0), and who was skipped and why.
    """
    task = make_task(plan.model, backwards=plan.backwards)
    setup = Setup(task=task, mesh=init_device_mesh("cpu", (plan.world_size,)))
    contestants, skipped = find_contestants(task, plan.names)
    reference = reference_losses(task, plan.world_size) if dist.get_rank() == 0 else []
    dist.barrier()
    built = [_build(contestant, setup, plan.steps) for contestant in contestants]
    runners = {who.name: runner for who, (runner, _) in zip(contestants, built, strict=True)}
    turns = None if plan.turn is None else Turns(plan.turn)
    if turns is None:
        times = interleave(runners, rounds=plan.rounds, warmup=plan.warmup)
    else:
        (name,) = runners
        times = {name: alone(runners[name], turns, rounds=plan.rounds, warmup=plan.warmup)}
    rows: list[Row] = []
    for contestant, (runner, memory) in zip(contestants, built, strict=True):
        with turns or nullcontext():  # the loopback is everybody's
            traffic, moved = _count(runner)
        rows.append(
            Row(
                contestant=contestant.name,
                stage=contestant.stage,
                once=contestant.once,
                times_ms=times[contestant.name],
                traffic=traffic,
                loopback_bytes=moved,
                memory=memory,
                losses=_mean_losses(runner),
            )
        )
    return rows, reference, skipped
