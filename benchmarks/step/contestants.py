"""Who takes part: plain PyTorch, DDP, DDP + ZeroRedundancyOptimizer and FSDP2.

A contestant is built from a `Setup` and is then a function from the batches of one optimizer
step to the mean loss over them; it keeps its model and optimizer state to itself. Everyone
divides each loss by the number of backward calls, so that gradients that add up are means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from step.models import Batch, Task

Step = Callable[[list[Batch]], Tensor]
ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "fused": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a contestant is built from; every rank has the same, but for its own rank."""

    task: Task
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to train.

    `stage` is "none", "0", "1", "2", "3" (parameters gathered again for backward) or "3 keep"
    (gathered once per backward call or window), with "bf16" behind it for bfloat16 arithmetic and
    wires on fp32 parameters, where "2" is FSDP2 without resharding in between. `once` says that
    gradients are reduced once per optimizer step rather than in each backward call. Contestants are
    compared with those that agree on both.
    """

    name: str
    stage: str
    once: bool
    build: Callable[[Setup], Step]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of everyone who takes a `torch.optim` one."""
    return torch.optim.AdamW(parameters, **ADAMW)


def imperative_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    *,
    around: Callable[[bool], Any] = lambda last: nullcontext(),
) -> Step:
    """The usual loop: N backward calls, an optimizer step, zero_grad.

    Args:
        module: called with a batch, returns its loss.
        optimizer: of the module's parameters.
        task: says how many backward calls there are.
        around: called before each forward with whether it is the step's last; the returned
            context is held until the end of the backward call.
    """
    last = task.backwards - 1

    def step(batches: list[Batch]) -> Tensor:
        total = torch.zeros(())
        for at, (x, y) in enumerate(batches):
            with around(at == last):
                loss = module(x, y) / task.backwards
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def plain(setup: Setup) -> Step:
    """No communication: what the arithmetic alone costs. At W > 1 the ranks drift apart."""
    module = setup.task.module()
    return imperative_step(module, adamw(module.parameters()), setup.task)


def _ddp(setup: Setup, *, zero: bool, once: bool) -> Step:
    module = DistributedDataParallel(setup.task.module(), process_group=setup.mesh.get_group())
    optimizer = (
        ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **ADAMW)
        if zero
        else adamw(module.parameters())
    )

    def around(last: bool) -> Any:
        return module.no_sync() if once and not last else nullcontext()

    return imperative_step(module, optimizer, setup.task, around=around)


def _fsdp2(setup: Setup, *, keep: bool, once: bool, dtype: torch.dtype | None = None) -> Step:
    module: Any = setup.task.module()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    shard = partial(fully_shard, mesh=setup.mesh, mp_policy=policy)
    # None is FSDP2's default for the root: what it holds itself stays gathered until backward.
    for block in module.blocks:
        shard(block, reshard_after_forward=not keep)
    shard(module, reshard_after_forward=False if keep else None)

    def around(last: bool) -> Any:
        if once:
            module.set_requires_gradient_sync(last)
            if keep:
                module.set_reshard_after_backward(last)
        return nullcontext()

    return imperative_step(module, adamw(module.parameters()), setup.task, around=around)


def torch_contestants(task: Task) -> list[Contestant]:
    """What PyTorch has itself; the variants that differ only for N > 1 are left out at N = 1."""
    several = task.backwards > 1
    found = [Contestant(name="plain", stage="none", once=True, build=plain)]
    for stage, name in (("0", "ddp"), ("1", "zero1")):
        build = partial(_ddp, zero=stage == "1")
        found.append(Contestant(name=name, stage=stage, once=True, build=partial(build, once=True)))
        if several:
            found.append(
                Contestant(
                    name=f"{name}_sync", stage=stage, once=False, build=partial(build, once=False)
                )
            )
    for stage, name in (("3", "fsdp2_reshard"), ("3 keep", "fsdp2_keep")):
        build = partial(_fsdp2, keep=stage == "3 keep")
        found.append(
            Contestant(name=name, stage=stage, once=not several, build=partial(build, once=False))
        )
        if several:
            found.append(
                Contestant(
                    name=f"{name}_nosync", stage=stage, once=True, build=partial(build, once=True)
                )
            )
        else:
            found.append(
                Contestant(
                    name=f"{name}_bf16",
                    stage="3 bf16" if stage == "3" else "2 bf16",
                    once=True,
                    build=partial(build, once=False, dtype=torch.bfloat16),
                )
            )
    return found
