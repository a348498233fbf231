"""A script for torchrun: DeepSpeed trains and saves, or loads a universal checkpoint and goes on.

by_deepspeed.py FOLDER STAGE DTYPE train   -> FOLDER/2 and FOLDER/4, its own checkpoints
by_deepspeed.py FOLDER STAGE DTYPE go_on   loads FOLDER's latest_universal -> FOLDER/facts.pt
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 4


def net() -> nn.Sequential:
    """Sizes that do not divide, a frozen parameter, one in a param group of its own."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.LayerNorm(2))
    module[0].bias.requires_grad_(False)
    return module


def adamw(module: nn.Module) -> torch.optim.AdamW:
    first, *rest = (p for p in module.parameters() if p.requires_grad)
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.01}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]
    )


def rows(update: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(10 * update + rank))


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().sum()


def facts_of(engine: Any) -> dict[str, dict[str, Tensor]]:
    """What DeepSpeed has of each parameter that learns."""
    utils: Any = importlib.import_module("deepspeed.utils")
    return {
        name: {
            "fp32": utils.safe_get_full_fp32_param(p).detach().clone(),
            "exp_avg": utils.safe_get_full_optimizer_state(p, "exp_avg").detach().clone(),
            "exp_avg_sq": utils.safe_get_full_optimizer_state(p, "exp_avg_sq").detach().clone(),
        }
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def main(folder: Path, stage: int, dtype: str, mode: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    deepspeed: Any = importlib.import_module("deepspeed")  # it may not be installed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at first use
    deepspeed.init_distributed("gloo", verbose=False)
    rank = int(os.environ["RANK"])
    module = net()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "checkpoint": {"load_universal": mode == "go_on"},
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module), config=config)
    found: dict[str, Any] = {}
    updates = range(4)
    if mode == "go_on":
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        found["options"] = [{**one, "params": []} for one in engine.optimizer.param_groups]
        found["loaded"] = facts_of(engine)
        updates = range(2, 4)
    for number in updates:
        x = rows(number, rank)
        engine.backward(loss_of(engine(x.to(next(module.parameters()).dtype))))
        engine.step()
        if mode == "train" and number % 2:
            engine.save_checkpoint(str(folder), tag=str(number + 1))
    if mode == "go_on":
        found["trained"] = facts_of(engine)
        if rank == 0:
            torch.save(found, folder / "facts.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
