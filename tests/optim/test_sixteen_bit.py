"""16-bit parameters without masters, of more elements than fit a vector register."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.strategies import integers

NUMEL = 71
OPTIMIZERS: dict[str, Any] = {
    "sgd": fzero.optim.sgd(0.5, momentum=0.5, master_weights=False),
    "torch sgd": fzero.optim.from_torch(
        functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5), master_weights=False
    ),
}


def updated(params: Tensor, grads: list[Tensor], optimizer: Any, stage: int) -> Tensor:
    """The parameters after an update by each gradient."""
    state = fzero.init({"w": params}, optimizer, stage=stage)
    for grad in grads:
        loss = fzero.grad_and_reduce(lambda p, g: (p["w"] * g).sum(), state)
        state = fzero.apply_gradients(loss(grad)[0])
    return fzero.full_params(state)["w"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sgd_updates_every_element(name: str, stage: int, dtype: torch.dtype) -> None:
    """p' = p - m / 2, m = m / 2 + g: exact, for all numbers are multiples of 1/4 below 16."""
    params = integers((NUMEL,), 1).to(dtype)
    grads = [integers((NUMEL,), seed).to(dtype) for seed in (2, 3)]
    got = updated(params, grads, OPTIMIZERS[name], stage)
    want = params - 0.5 * grads[0] - 0.5 * (0.5 * grads[0] + grads[1])
    assert got.dtype == dtype
    assert torch.equal(got, want)
