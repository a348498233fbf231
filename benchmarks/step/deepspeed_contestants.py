"""DeepSpeed's stages 0 to 3, with its defaults but for what is commented below."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from step.contestants import Contestant, Setup, Step, adamw
from step.models import Batch, Task


def is_installed() -> bool:
    """Whether `import deepspeed` can work; it is in the `bench` extra."""
    return importlib.util.find_spec("deepspeed") is not None


def _config(setup: Setup, *, stage: int, coalesce: bool, strict: bool) -> dict[str, Any]:
    numel = sum(parameter.numel() for parameter in setup.task.module().parameters())
    # Its default bucket, 5e8 elements, is allocated at once (1.9 GiB a rank). One that holds the
    # whole model makes the same reductions.
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": numel}
    if strict:
        # By default models below 1e9 parameters are gathered once and kept until backward ends.
        zero |= {
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1 if coalesce else setup.task.backwards,
        "gradient_clipping": 0.0,  # the default, 1.0, would clip, which nobody else here does
        "zero_optimization": zero,
    }


def deepspeed_engine(setup: Setup, config: dict[str, Any]) -> Any:
    """A DeepSpeed engine for the task's module and the AdamW of everyone."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # A shared-memory kernel that only inference uses, compiled for a minute at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    module = setup.task.module()
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=adamw(module.parameters()), config=config
    )
    return engine


def build(setup: Setup, *, stage: int, coalesce: bool = False, strict: bool = False) -> Step:
    """A DeepSpeed engine; `coalesce` reduces once by `engine.coalesce_grad_reduction()`."""
    engine = deepspeed_engine(setup, _config(setup, stage=stage, coalesce=coalesce, strict=strict))

    def step(batches: list[Batch]) -> Tensor:
        total = torch.zeros(())
        with engine.coalesce_grad_reduction() if coalesce else nullcontext():
            for x, y in batches:
                loss = engine(x, y) / setup.task.backwards
                engine.backward(loss, scale_wrt_gas=False)
                total += loss.detach()
                if not coalesce:
                    engine.step()  # counts to gradient_accumulation_steps, then updates
        if coalesce:
            engine.step()
        return total

    return step


def deepspeed_contestants(task: Task) -> list[Contestant]:
    """Stages 0 to 3; for N > 1 also with one coalesced reduction (stages 1 to 3)."""
    several = task.backwards > 1
    found: list[Contestant] = []
    for stage, label in ((0, "0"), (1, "1"), (2, "2"), (3, "3 keep")):
        at = partial(build, stage=stage)
        once = stage < 2 or not several  # stages 0 and 1 wait for the last backward by themselves
        found.append(Contestant(name=f"ds{stage}", stage=label, once=once, build=at))
        if several and stage > 0:
            coalesced = partial(at, coalesce=True)
            found.append(
                Contestant(name=f"ds{stage}_coal", stage=label, once=True, build=coalesced)
            )
    strict = partial(build, stage=3, strict=True)
    found.append(Contestant(name="ds3_strict", stage="3", once=not several, build=strict))
    if several:
        found.append(
            Contestant(
                name="ds3_strict_coal", stage="3", once=True, build=partial(strict, coalesce=True)
            )
        )
    return found
