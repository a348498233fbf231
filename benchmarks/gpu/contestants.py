"""Who takes part: plain PyTorch, DDP, FSDP2, the engine and the functional step.

A contestant is a function from a `Task` to a step (batch -> loss, []) and what ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fzero
from fzero.adapter import Engine
from gpu.model import Task

BF16 = torch.bfloat16
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


class Built(NamedTuple):
    """A contestant that is ready to train."""

    step: Callable[[Tensor], Tensor]
    close: Callable[[], object] = lambda: None


def loop(module: Any, forward: Callable[[Tensor], Tensor]) -> Built:
    """loss.backward() and a fused AdamW on the module's parameters."""
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Built(step)


def _autocast(task: Task, module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`module`, under autocast where its parameters are fp32."""
    if task.precision == "bf16":
        return module

    def forward(batch: Tensor) -> Tensor:
        with torch.autocast(task.device, BF16):
            return module(batch)

    return forward


def _module(task: Task) -> nn.Module:
    return task.module(BF16 if task.precision == "bf16" else torch.float32)


def plain(task: Task) -> Built:
    """No communication."""
    module = _module(task)
    return loop(module, _autocast(task, module))


def ddp(task: Task) -> Built:
    """DistributedDataParallel as it comes, but for the views that spare a copy."""
    module = DistributedDataParallel(_module(task), gradient_as_bucket_view=True)
    return loop(module, _autocast(task, module))


def fsdp2(task: Task, *, reshard: bool) -> Built:
    """`fully_shard` of each block and the root."""
    module: Any = _module(task)
    mesh = init_device_mesh(task.device, (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if task.precision == "masters":
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    for block in module.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(module, reshard_after_forward=None if reshard else False, **options)
    return loop(module, module)


def engine(task: Task, *, local: bool = False, **options: Any) -> Built:
    """The usual loop under `fzero.adapter.Engine`; `local` is an axis without a group."""
    module = task.module(BF16)
    if task.precision == "bf16":
        options |= {"master_weights": False, "accumulate_dtype": BF16}
    if local:
        options["mesh"] = fzero.Axis(size=1)
    shell = Engine(module, torch.optim.AdamW(module.parameters(), **ADAMW), **options)

    def step(batch: Tensor) -> Tensor:
        loss = shell(batch)
        loss.backward()
        shell.step()
        return loss.detach()

    return Built(step, shell.close)


def functional(task: Task, *, local: bool = False, **options: Any) -> Built:
    """`fzero.shard(step, donate=True)`."""
    apply, params = fzero.functionalize(task.module(BF16))
    if local:
        options["mesh"] = fzero.Axis(size=1)

    def step_fn(state: Any, batch: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(apply, state)(batch)
        return fzero.apply_gradients(state), loss

    train_step = fzero.shard(step_fn, donate=True, **options)
    rates = {name: value for name, value in ADAMW.items() if name != "lr"}
    masters = task.precision == "masters"
    optimizer = fzero.optim.adamw(ADAMW["lr"], master_weights=masters, **rates)
    held = [train_step.init(params, optimizer)]

    def step(batch: Tensor) -> Tensor:
        held[0], loss = train_step(held[0], batch)
        return loss

    return Built(step, held.clear)


def contestants(size: int) -> dict[str, Callable[[Task], Built]]:
    """name -> how to build it; "plain" comes first, for the others are compared with it.

    At one rank `engine0` and its like run their collectives over a group of one rank (as DDP and
    FSDP2 do), `engine0_local` and `functional0_local` none. Stage 3 gathers again for backward;
    `_keep` does not.
    """
    found: dict[str, Callable[[Task], Built]] = {"plain": plain, "ddp": ddp}
    found |= {"fsdp2": partial(fsdp2, reshard=True), "fsdp2_keep": partial(fsdp2, reshard=False)}
    for name, build in (("engine", engine), ("functional", functional)):
        if size == 1:
            found[f"{name}0_local"] = partial(build, stage=0, local=True)
        for stage in range(4):
            again = {"reshard_after_forward": True} if stage == 3 else {}
            found[f"{name}{stage}"] = partial(build, stage=stage, **again)
        found[f"{name}3_keep"] = partial(build, stage=3, reshard_after_forward=False)
    return found
