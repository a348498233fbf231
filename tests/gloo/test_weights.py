"""Law 15 on gloo: the mean over rows that ranks split unevenly, by both drivers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.ranks import run_ranks
from tests.strategies import integers

pytestmark = pytest.mark.xdist_group("gloo")

SPLITS = {2: [[4, 0], [1, 2]], 3: [[0, 0], [2, 4], [1, 0]]}  # [rank][call]: rows


def model() -> Any:
    made = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 2.0, -1.0], [0.0, 1.0, 3.0]]))
    return made


def loss_of(out: Tensor) -> Tensor:
    """The mean over rows: NaN for none."""
    return out.square().sum(1).mean()


def updated(rank: int, ranks: int, x: Tensor) -> dict[Any, Tensor]:
    """The weight after an update, by driver, stage and window."""
    calls = [part for part in x.split([n for own in SPLITS[ranks] for n in own])]
    own, found = calls[2 * rank : 2 * rank + 2], {}
    for stage in range(4):
        for window in (False, True):
            trained = model()
            engine = Engine(trained, torch.optim.SGD(trained.parameters(), 0.5), stage=stage)
            with engine.coalesce() if window else contextlib.nullcontext():
                for part in own:
                    engine.backward(loss_of(engine(part)), weight=len(part))
            engine.step()
            found["engine", stage, window] = engine.full_parameters()["weight"].clone()
            engine.close()

            def step(state: Any) -> Any:
                for part in own:
                    g = fzero.grad_and_reduce(lambda p, x: loss_of(x @ p["w"].T), state,
                                              weight=torch.tensor(len(part)))  # fmt: skip
                    state, _ = g(part)
                return fzero.apply_gradients(state), None

            run = fzero.shard(fzero.coalesce(step) if window else step, stage=stage)
            state = run.init({"w": model().weight.detach()}, fzero.optim.sgd(0.5))
            found["step", stage, window] = fzero.full_params(run(state)[0])["w"]
    return found


@pytest.mark.parametrize("ranks", SPLITS)
def test_any_split_gives_the_update_of_one_process_bit_for_bit(ranks: int) -> None:
    rows = sum(map(sum, SPLITS[ranks]))
    x = integers((rows, 3), 7).float()
    plain = model()
    plain(x).square().sum().backward()
    want = plain.weight - 0.5 * plain.weight.grad / rows
    for found in run_ranks(updated, ranks, x):
        for where, weight in found.items():
            assert torch.equal(weight, want), where
