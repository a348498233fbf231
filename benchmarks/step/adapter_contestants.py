"""The adapter's stages 0 to 3: an `fzero.adapter.Engine` around the module, in the usual loop."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.adapter import Engine
from step.contestants import Contestant, Setup, Step, adamw
from step.models import Batch, Task

# "3": nothing is kept for a second use, and about one block is gathered ahead, as FSDP2 does.
RESHARD = {"max_reuse_distance_numel": 0, "prefetch_bucket_numel": 2**20}
# Gathered once per update, however many backwards there are before it, as FSDP2's `_nosync`.
PERSIST = {"persistence_threshold_numel": sys.maxsize}


def build(setup: Setup, *, stage: int, coalesce: bool = False, **options: Any) -> Step:
    """An engine with its defaults but for `options`; `coalesce` reduces once per step."""
    module = setup.task.module()
    optimizer = adamw(module.parameters())
    engine = Engine(module, optimizer, stage=stage, mesh=setup.mesh, **options)

    def step(batches: list[Batch]) -> Tensor:
        total = torch.zeros(())
        with engine.coalesce() if coalesce else nullcontext():
            for x, y in batches:
                loss = engine(x, y) / setup.task.backwards
                loss.backward()
                total += loss.detach()
        engine.step()
        return total

    return step


def adapter_contestants(task: Task) -> list[Contestant]:
    """Every stage; at stage 3 both policies, with and without `lockstep`; coalesced for N > 1."""
    several = task.backwards > 1
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        (f"adapter{stage}", str(stage), {"stage": stage}) for stage in range(3)
    ]
    for suffix, lockstep in (("", False), ("_lockstep", True)):
        options = {"stage": 3, "lockstep": lockstep}
        kinds.append((f"adapter3{suffix}", "3", options | RESHARD))
        kinds.append((f"adapter3_keep{suffix}", "3 keep", options))
        if several:
            kinds.append((f"adapter3_persist{suffix}", "3 keep", options | PERSIST))
    found: list[Contestant] = []
    for name, stage, options in kinds:
        at = partial(build, **options)
        found.append(Contestant(name=name, stage=stage, once=not several, build=at))
        if several:
            coalesced = partial(at, coalesce=True)
            found.append(Contestant(name=f"{name}_coal", stage=stage, once=True, build=coalesced))
    return found
