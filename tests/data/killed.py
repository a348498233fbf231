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
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero.data import Order, batches

WORKERS: Any = {"num_workers": 2, "prefetch_factor": 4}


def new_order() -> Order:
    return Order(43, batch_size=2, logical_ranks=4, seed=3, drop_last=False)


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.dropout(params["w"] * x / 43, 0.5).square().mean()


def step_fn(state: fzero.TrainState, x: Tensor, sizes: list[int]) -> Any:
    state, loss = fzero.grad_and_reduce(loss_fn, state, sizes=sizes, weight=sizes)(x)
    return fzero.apply_gradients(state), loss


def train(folder: Path, until: int, trained: Callable[[int, list[int]], None]) -> Tensor:
    """Go on from the checkpoint of `folder`, if it has one, to the batch at position `until`.

    Return the parameters.
    """
    step = fzero.shard(step_fn, stage=2, logical_ranks=4, seed=5)
    state = step.init({"w": torch.linspace(1, 2, 7)}, fzero.optim.adamw(1e-2))
    extra: dict[str, Any] = {}
    if (folder / "kept").exists():
        state, extra = fzero.checkpoint.load_with_extra(folder / "kept", state)
    order = new_order().resumed(extra.get("order"))
    rows = torch.arange(float(order.length)).reshape(-1, 1)
    for x, after in batches(rows, order, **WORKERS):
        state, _ = step(state, x, order.sizes())
        trained(order.position, x.flatten().int().tolist())
        order = after
        fzero.checkpoint.save(folder / "kept", state, extra={"order": order})
        if order.position == until:
            break
    return fzero.full_params(state)["w"]


def main(folder: Path, until: int) -> None:
    def trained(position: int, ids: list[int]) -> None:
        with (folder / f"{fzero.world().size}-{fzero.axis_index()}").open("a") as file:
            file.write(json.dumps([position, ids]) + "\n")
        if position == until:
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, until + 1, trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
