"""A training that saves after each batch, and is killed behind an update, before its save.

    torchrun --nproc-per-node W killed.py folder batches

It writes a line for each batch that it trained on: its position and the ids of this rank's rows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.data import Order, batches

WORKERS: Any = {"num_workers": 2, "prefetch_factor": 4}


def new_order() -> Order:
    return Order(43, batch_size=2, logical_ranks=4, seed=3, drop_last=False)


def step_fn(state: fzero.TrainState, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).square().sum(), state)(x)
    return fzero.apply_gradients(state), loss


def train(folder: Path, until: int, trained: Callable[[int, list[int]], None]) -> None:
    """Go on from the checkpoint of `folder`, if it has one, to the batch at position `until`."""
    step = fzero.shard(step_fn, stage=2)
    state = step.init({"w": torch.ones(1)}, fzero.optim.sgd(1e-6))
    extra: dict[str, Any] = {}
    if (folder / "kept").exists():
        state, extra = fzero.checkpoint.load_with_extra(folder / "kept", state)
    order = new_order().resumed(extra.get("order"))
    rows = torch.arange(float(order.length)).reshape(-1, 1)
    for x, after in batches(rows, order, **WORKERS):
        state, _ = step(state, x)
        trained(order.position, x.flatten().int().tolist())
        order = after
        fzero.checkpoint.save(folder / "kept", state, extra={"order": order})
        if order.position == until:
            return


def main(folder: Path, until: int) -> None:
    def trained(position: int, ids: list[int]) -> None:
        with (folder / f"{fzero.world().size}-{fzero.axis_index()}").open("a") as file:
            file.write(json.dumps([position, ids]) + "\n")
        if position == until:
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, until + 1, trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
