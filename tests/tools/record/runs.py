"""Recorded runs, of steps and of engines."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import MismatchError

RANKS, CALLS = 2, 7


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def rule() -> Any:
    return fzero.optim.adamw(0.1)


def step_of(
    stage: int, *, ranks: int = RANKS, dropout: float = 0.0, windows: bool = False, **options: Any
) -> Any:
    apply, params = fzero.functionalize(model())

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return F.dropout(apply(params, x).square(), dropout).mean()

    def step_fn(state: Any, x: Tensor) -> Any:
        for part in x.chunk(2):
            state, loss = fzero.grad_and_reduce(loss_fn, state)(part)
        return fzero.apply_gradients(state), loss

    step = fzero.shard(fzero.coalesce(step_fn) if windows else step_fn, stage=stage, **options)
    step = fzero.simulate(step, world_size=ranks)
    return step, step.init(params, rule())


def batch(number: int, ranks: int = RANKS) -> Tensor:
    g = torch.Generator().manual_seed(number)
    return torch.randn(ranks, 4, 3, generator=g, dtype=torch.float64)


def recorded(
    stage: int, calls: int = CALLS, spoil: Any = None, **options: Any
) -> fzero.tools.Recording:
    of_record = {key: options.pop(key) for key in ("every", "keep") if key in options}
    step, state = step_of(stage, **options)
    step = fzero.record(step, **{"every": 3, "keep": None, **of_record})
    with contextlib.suppress(MismatchError):  # of ranks that have parted
        for number in range(calls):
            x = batch(number)
            if spoil is not None:
                state, x = spoil(number, state, x)
            state, _ = step(state, x)
    return step.recording


def same_values(a: Any, b: Any) -> None:
    for name, x in a.items():
        torch.testing.assert_close(x, b[name], rtol=1e-12, atol=1e-12)


def values_of(state: Any, ranks: int) -> Any:
    if ranks == 1:
        return fzero.full_params(state)
    found = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    return {name: x[0] for name, x in found.items()}


def engine_of(stage: int) -> Engine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    return Engine(module, torch.optim.AdamW(module.parameters(), 0.1), stage=stage)


def train_step(engine: Engine, x: Tensor) -> Tensor:
    loss = engine(x).square().mean()
    loss.backward()
    engine.step()
    return loss.detach()
