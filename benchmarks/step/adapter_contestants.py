"""The adapter's stages 0 to 3: an `fzero.adapter.Engine` around the module, in the usual loop."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.adapter import Autocast, Engine
from step.contestants import Contestant, Setup, Step, adamw
from step.fzero_contestants import AWAY, LOWERED
from step.models import Batch, Task


def build(setup: Setup, *, stage: int, coalesce: bool = False, **options: Any) -> Step:
    """An engine with its defaults but for `options`; `coalesce` reduces once per step.

    As the peers do, in the last backward; or after it, where parameters stay gathered until then.
    """
    module = setup.task.module()
    optimizer = adamw(module.parameters())
    engine = Engine(module, optimizer, stage=stage, mesh=setup.mesh, **options)
    waiting = setup.task.backwards - (options.get("reshard_after_forward") != "window")

    def backward(batches: list[Batch]) -> Tensor:
        total = torch.zeros(())
        for x, y in batches:
            loss = engine(x, y) / setup.task.backwards
            loss.backward()
            total += loss.detach()
        return total

    def step(batches: list[Batch]) -> Tensor:
        with engine.no_sync() if coalesce else nullcontext():
            total = backward(batches[:waiting])
        total += backward(batches[waiting:])
        engine.step()
        return total

    return step


def adapter_contestants(task: Task) -> list[Contestant]:
    """Every stage; at stage 3 both policies; coalesced for N > 1."""
    several = task.backwards > 1
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        (f"adapter{stage}", str(stage), {"stage": stage}) for stage in range(4)
    ]
    kept = "window" if several else False
    kinds.append(("adapter3_keep", "3 keep", {"stage": 3, "reshard_after_forward": kept}))
    found: list[Contestant] = []
    for name, stage, options in kinds:
        at = partial(build, **options)
        found.append(Contestant(name=name, stage=stage, once=not several, build=at))
        if not several and stage in ("2", "3"):
            homes: dict[str, Any] = dict.fromkeys(AWAY[int(stage)], "disk")
            away = fzero.Offload(**homes, folder=tempfile.gettempdir())
            disk = partial(at, offload=away)
            found.append(Contestant(name=f"{name}_disk", stage=stage, once=True, build=disk))
            for ending, safe in (("bf16", None), ("bf16_all", LOWERED)):
                lower = Autocast(dtype=torch.bfloat16, lower_precision_safe_modules=safe)
                low = partial(at, autocast=lower)
                found.append(
                    Contestant(name=f"{name}_{ending}", stage=f"{stage} bf16", once=True, build=low)
                )
        if several:
            coalesced = partial(at, coalesce=True)
            found.append(Contestant(name=f"{name}_coal", stage=stage, once=True, build=coalesced))
    return found
