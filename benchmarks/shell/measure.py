"""What one rank does: build every contestant of one model, time its phases, check it, count it."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from ranks import interleave_phases
from step.contestants import Setup, adamw
from step.count import CollectiveCounter, Traffic
from step.deepspeed_contestants import is_installed
from step.models import Task
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shell.contestants import (
    LARGE,
    LEFT_OUT,
    Contestant,
    Phases,
    Small,
    by_buckets,
    by_units,
    everyone,
)

WARMUP = 3
SLOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One table: a model, a world, and who takes part."""

    kind: str  # "parameters" (everyone), "buckets" or "units"
    world_size: int
    count: int  # of parameters
    parts: int
    rounds: int
    numbers: tuple[int, ...] = ()  # of buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one contestant; times of the slowest rank, one per round."""

    contestant: str
    stage: str
    backward_ms: list[float]
    update_ms: list[float]
    traffic: list[Traffic]
    buckets: int | None
    loss_error: float


def inputs(*, step: int, rank: int) -> Tensor:
    """x of one rank and step: no two ranks have the same series, nor one in a fixed ratio."""
    return torch.tensor(float((2 * step + 3 * rank + step * rank) % 5 + 1))


def reference(task: Task, world_size: int, steps: int) -> list[Tensor]:
    """sum_i sum(p_i) before each step of one process that has all the data."""
    module = task.module()
    optimizer = adamw(module.parameters())
    sums: list[Tensor] = []
    for step in range(steps):
        with torch.no_grad():
            sums.append(module(torch.ones(()), torch.ones(())))
        x = torch.stack([inputs(step=step, rank=rank) for rank in range(world_size)]).mean()
        module(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sums


class Runner:
    """A contestant that walks through its inputs: `backward`, `update`, `backward`, ..."""

    def __init__(self, phases: Phases) -> None:
        """Take what is to be run."""
        self.phases = phases
        self.sums: list[Tensor] = []

    def backward(self) -> None:
        """Forward, backward and reduction of the next step."""
        x = inputs(step=len(self.sums), rank=dist.get_rank())
        self.sums.append(self.phases.backward(x).detach() / x)

    def update(self) -> None:
        """Update the parameters, clear the gradients."""
        self.phases.update()


def contestants(plan: Plan) -> tuple[list[Contestant], list[str]]:
    """Who takes part in this table, and why others do not."""
    if plan.kind == "buckets":
        return by_buckets(plan.count, list(plan.numbers)), []
    chosen = everyone() if plan.kind == "parameters" else by_units()
    reasons = dict(LEFT_OUT) if plan.count >= LARGE else {}
    if not is_installed():
        lacking = "deepspeed is not installed (pip install 'fzero[bench]')"
        reasons |= {item.name: lacking for item in chosen if item.name.startswith("ds")}
    skipped = [f"{item.name}: {reasons[item.name]}" for item in chosen if item.name in reasons]
    return [item for item in chosen if item.name not in reasons], skipped


def _build(contestant: Contestant, setup: Setup) -> tuple[Runner, float]:
    """The contestant after one step, and the seconds that this took the slowest rank."""
    start = time.perf_counter()
    try:
        runner = Runner(contestant.build(setup))
        runner.backward()
        runner.update()
    except Exception as error:
        error.add_note(f"This was contestant {contestant.name}, on rank {dist.get_rank()}.")
        raise
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"  built {contestant.name} in {seconds.item():.1f} s", flush=True)
    return runner, seconds.item()


def _count(runner: Runner) -> list[Traffic]:
    with CollectiveCounter() as counter:
        runner.backward()
        runner.update()
    dist.barrier()
    return counter.traffic()


def _error(sums: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of any rank, as a part of what the steps changed altogether."""
    change = (wanted[-1] - wanted[0]).abs()
    worst = (torch.stack(list(sums)) - torch.stack(list(wanted))).abs().max() / change
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def measure(plan: Plan) -> tuple[list[Row], list[str]]:
    """Measure one table; runs on every rank. Returns the rows, and who was left out and why."""
    task = Task(
        name="small",
        make_module=partial(Small, plan.count, plan.parts),
        make_batch=lambda generator: (torch.ones(()), torch.ones(())),
        backwards=1,
    )
    setup = Setup(task=task, mesh=init_device_mesh("cpu", (plan.world_size,)))
    chosen, skipped = contestants(plan)
    runners: dict[str, Runner] = {}
    for item in chosen:
        runner, seconds = _build(item, setup)
        if seconds <= SLOW_S:
            runners[item.name] = runner
        else:
            skipped.append(f"{item.name}: {seconds:.0f} s to build it and take one step")
        del runner
    # What one contestant holds must not make the collections of all the others longer.
    gc.collect()
    gc.freeze()
    phases = {name: (runner.backward, runner.update) for name, runner in runners.items()}
    times = interleave_phases(phases, rounds=plan.rounds, warmup=WARMUP)
    wanted = reference(task, plan.world_size, 1 + WARMUP + plan.rounds + 1)
    rows: list[Row] = []
    for item in (item for item in chosen if item.name in runners):
        runner = runners[item.name]
        traffic = _count(runner)
        backward_ms, update_ms = times[item.name]
        rows.append(
            Row(
                contestant=item.name,
                stage=item.stage,
                backward_ms=backward_ms,
                update_ms=update_ms,
                traffic=traffic,
                buckets=runner.phases.buckets,
                loss_error=_error(runner.sums, wanted),
            )
        )
    return rows, skipped
