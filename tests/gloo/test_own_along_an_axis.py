"""Ranks along "seq" hold other positions on purpose: `own=` says so, to both drivers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import MismatchError
from tests.ranks import run_ranks
from tests.strategies import integers, same

pytestmark = pytest.mark.xdist_group("gloo")

AXES = {"data": 2, "seq": 2}
RATE = 2.0**-6
W, X = integers((4,), 1), integers((2, 6, 4), 2)  # rows of "data", positions, width


class Positions(nn.Module):
    """Each rank has the positions of its piece of the sequence, in a buffer."""

    positions: Tensor

    def __init__(self, seq: int) -> None:
        super().__init__()
        self.w = nn.Parameter(W.clone())
        self.register_buffer("positions", torch.arange(3.0).double() + 3 * seq)

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.w) * self.positions).sum()


def updated(rank: int, world_size: int) -> Any:
    data, seq = divmod(rank, 2)
    x = X[data, 3 * seq : 3 * seq + 3]
    with pytest.raises(MismatchError, match="positions differs"):
        _, params = fzero.functionalize(Positions(seq))
        fzero.init(params, fzero.optim.sgd(RATE), stage=2, mesh=AXES)
    apply, params = fzero.functionalize(Positions(seq), own=["positions"])
    state = fzero.init(params, fzero.optim.sgd(RATE), stage=2, mesh=AXES)
    state, _ = fzero.grad_and_reduce(lambda p, x: apply(p, x), state)(x)
    module = Positions(seq)
    rule = torch.optim.SGD(module.parameters(), RATE)
    engine = Engine(module, rule, stage=2, mesh=AXES, own=["positions"])
    engine.backward(engine(x))
    engine.step()
    of_engine, of_step = engine.state, fzero.apply_gradients(state)
    return [fzero.full_params(one)["w"] for one in (of_engine, of_step)]


def test_positions_may_differ_along_the_sequence() -> None:
    w = W.clone().requires_grad_()
    (((X @ w) * torch.arange(6.0).double()).sum() / 4).backward()
    assert w.grad is not None
    wanted = W - RATE * w.grad
    for found in run_ranks(updated, 4):
        for one in found:
            same(one, wanted)
