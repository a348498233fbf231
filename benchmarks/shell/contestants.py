"""Who takes part, each as three functions of one step: backward, update, and how it is checked.

Every builder gets the same module, data and AdamW. The loss of one step is x sum_i sum(p_i) with
a number x that differs by step and rank: two small kernels for each parameter, a multiply in
forward and its gradient, and one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from step.contestants import ADAMW, Setup, adamw
from step.deepspeed_contestants import deepspeed_engine
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fzero.adapter import Engine

NUMEL = 8  # elements of each parameter
LARGE = 5_000  # from so many parameters on these are left out, and why
LEFT_OUT = {
    "fsdp2": "its first AdamW step grows with the square: 6 s at 1,000 parameters, 17 s at 2,000",
    "ds1": "half a minute to build, and ds2 runs the same code",
    "ds3": "minutes to build and warm up",
    "ds3_persist": "minutes to build and warm up",
}


class Part(nn.Module):
    """Some parameters of 8 elements; a unit of stage 3."""

    def __init__(self, count: int, first: int) -> None:
        """Parameter i is all ((first + i) % 7 + 1) / 64."""
        super().__init__()
        for i in range(count):
            start = torch.full((NUMEL,), ((first + i) % 7 + 1) / 64)
            self.register_parameter(f"p{i}", nn.Parameter(start))

    def forward(self, x: Tensor) -> Tensor:
        """x: [] -> x times the sum of all elements, []."""
        return torch.cat(torch._foreach_mul(list(self._parameters.values()), x)).sum()


class Small(nn.Module):
    """`count` parameters in `parts` parts. `forward(x, y)` is the loss; y is not used."""

    def __init__(self, count: int, parts: int) -> None:
        """Split the parameters evenly."""
        super().__init__()
        each = count // parts
        self.blocks = nn.ModuleList(Part(each, part * each) for part in range(parts))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [] -> []."""
        return torch.stack([block(x) for block in self.blocks]).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """One step in two parts that are timed apart, and the number of gradient buckets if known."""

    backward: Callable[[Tensor], Tensor]  # x -> loss; the gradients have crossed ranks after it
    update: Callable[[], object]  # and everything cleared for the next step
    buckets: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to train."""

    name: str
    stage: str
    build: Callable[[Setup], Phases]


def _usual(module: nn.Module, optimizer: torch.optim.Optimizer) -> Phases:
    def backward(x: Tensor) -> Tensor:
        loss = module(x, x)
        loss.backward()
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Phases(backward=backward, update=update)


def plain(setup: Setup) -> Phases:
    """No communication; what everybody's time is compared with."""
    module = setup.task.module()
    return _usual(module, adamw(module.parameters()))


def ddp(setup: Setup, *, zero: bool = False, bucket_bytes: int | None = None) -> Phases:
    """DistributedDataParallel; its default first bucket is 1 MiB, the others 25 MiB."""
    mib = None if bucket_bytes is None else bucket_bytes / 2**20
    module = DistributedDataParallel(
        setup.task.module(), process_group=setup.mesh.get_group(), bucket_cap_mb=mib
    )
    optimizer = (
        ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **ADAMW)
        if zero
        else adamw(module.parameters())
    )
    return _usual(module, optimizer)


def fsdp2(setup: Setup) -> Phases:
    """`fully_shard` of each part and the root; gathered once, as everybody does by default here."""
    module: Any = setup.task.module()
    for block in module.blocks:
        fully_shard(block, mesh=setup.mesh, reshard_after_forward=False)
    fully_shard(module, mesh=setup.mesh, reshard_after_forward=False)
    return _usual(module, adamw(module.parameters()))


def deepspeed(setup: Setup, *, stage: int, persist: bool = False) -> Phases:
    """DeepSpeed; `persist` keeps small parameters gathered, which is its default."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2**20}  # holds all gradients
    if not persist:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    engine = deepspeed_engine(setup, config)

    def backward(x: Tensor) -> Tensor:
        loss = engine(x, x)
        engine.backward(loss)
        return loss

    return Phases(backward=backward, update=engine.step)


def adapter(setup: Setup, *, stage: int, **options: Any) -> Phases:
    """`fzero.adapter.Engine` with its defaults, but for `options`."""
    module = setup.task.module()
    optimizer = adamw(module.parameters())
    engine = Engine(module, optimizer, stage=stage, mesh=setup.mesh, **options)

    def backward(x: Tensor) -> Tensor:
        loss = engine(x, x)
        loss.backward()
        return loss

    buckets = len(engine.state.setup.layout.trainable)
    return Phases(backward=backward, update=engine.step, buckets=buckets)


def everyone() -> list[Contestant]:
    """Those of the table over numbers of parameters, with their defaults."""
    persistent = {"persistence_threshold_numel": 10**6}
    kinds: list[tuple[str, str, Callable[[Setup], Phases]]] = [
        ("plain", "none", plain),
        ("ddp", "0", ddp),
        ("ds0", "0", partial(deepspeed, stage=0)),
        ("adapter0", "0", partial(adapter, stage=0)),
        ("zero1", "1", partial(ddp, zero=True)),
        ("ds1", "1", partial(deepspeed, stage=1)),
        ("adapter1", "1", partial(adapter, stage=1)),
        ("ds2", "2", partial(deepspeed, stage=2)),
        ("adapter2", "2", partial(adapter, stage=2)),
        ("fsdp2", "3", fsdp2),
        ("ds3", "3", partial(deepspeed, stage=3)),
        ("adapter3", "3", partial(adapter, stage=3)),
        ("ds3_persist", "3 persist", partial(deepspeed, stage=3, persist=True)),
        ("adapter3_persist", "3 persist", partial(adapter, stage=3, **persistent)),
    ]
    return [Contestant(name=name, stage=stage, build=build) for name, stage, build in kinds]


def by_buckets(count: int, numbers: list[int]) -> list[Contestant]:
    """The adapter and DDP at about so many buckets each."""
    found = [Contestant(name="plain", stage="none", build=plain)]
    for number in numbers:
        size = NUMEL * 4 * count // number
        for stage in (0, 2):
            build = partial(adapter, stage=stage, bucket_bytes=size)
            found.append(Contestant(name=f"adapter{stage}/{number}", stage=str(stage), build=build))
        build = partial(ddp, bucket_bytes=size)
        found.append(Contestant(name=f"ddp/{number}", stage="0", build=build))
    return found


def by_units() -> list[Contestant]:
    """Stage 3 where each part of the model is gathered by itself."""
    wanted = ("plain", "fsdp2", "ds3", "adapter3")
    return [item for item in everyone() if item.name in wanted]
