"""fzero on "sim": the numbers of a CPU, and no order that is luck.

What is not here yet does not run on a device that is neither CPU nor CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fzero
from tests.device import on_sim
from tests.device.order import checked
from tests.gpu import training
from tests.gpu.bodies import STAGES
from tests.gpu.training import Task

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"backwards": 2, "max_norm": 0.5},
    "remat": {"checkpoint": "remat"},
    "fp16": {"dtype": torch.float16, "steps": 4},
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("options", OPTIONS)
@on_sim(2)
def test_a_functional_step_on_two_ranks(stage: int, options: str) -> None:
    task = Task(stage=stage, **OPTIONS[options])
    with checked() as order:
        got = training.by_function(task, dist.get_rank(), "sim")
    order.require_none()
    training.check_close(got, training.by_function(task, dist.get_rank(), "cpu"))


@pytest.mark.parametrize("stage", STAGES)
@on_sim()
def test_virtual_ranks(stage: int) -> None:
    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, p["weight"], p["bias"]).square().mean()

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), None

    def trained(device: str) -> dict[str, Tensor]:
        torch.manual_seed(1)
        params = {"weight": torch.randn(5, 3), "bias": torch.randn(5)}
        x = torch.randn(2, 4, 3).to(device)
        run = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=2)
        state = run.init({k: p.to(device) for k, p in params.items()}, fzero.optim.sgd(0.1))
        for _ in range(3):
            state, _ = run(state, x)
        return fzero.simulate(fzero.full_params, world_size=2)(state)

    with checked() as order:
        got = trained("sim")
    order.require_none()
    for name, wanted in trained("cpu").items():
        torch.testing.assert_close(got[name].cpu(), wanted)
