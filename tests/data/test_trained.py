"""A run over an order: the bits of dropout, short batches and weights on any number of ranks."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fzero
from fzero.data import Order, batches
from tests.covering import covered

ROWS, LOGICAL, UPDATES = 23, 4, 8


def trained(world: int, stage: int, *, parts: int = 1) -> Tensor:
    """Train on `world` virtual ranks; with `parts`, on from an order that JSON has held."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(ROWS, 4), torch.randint(3, (ROWS,)))
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    apply, params = fzero.functionalize(net)

    def loss_fn(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(apply(p, x), y)

    def step_fn(state: fzero.TrainState, x: Tensor, y: Tensor, sizes: list[int]) -> Any:
        reduced = fzero.grad_and_reduce(loss_fn, state, sizes=sizes, weight=sizes)
        state, loss = reduced(x, y)
        return fzero.apply_gradients(state), loss

    step = fzero.shard(step_fn, stage=stage, logical_ranks=LOGICAL, seed=4)

    def run(_: Tensor) -> Tensor:
        state = step.init(params, fzero.optim.adamw(1e-2))
        order = Order(ROWS, batch_size=2, logical_ranks=LOGICAL, seed=1, drop_last=False)
        losses: list[Tensor] = []
        for part in range(1, parts + 1):
            order = order.resumed(json.loads(json.dumps(order.state_dict())))
            for (x, y), after in batches(data, order):
                state, loss = step(state, x, y, order.sizes())
                losses.append(loss)
                order = after
                if order.position == UPDATES * part // parts:
                    break
        full = fzero.full_params(state)
        return torch.cat([torch.stack(losses), *(value.flatten() for value in full.values())])

    found = fzero.simulate(run, world_size=world)(torch.zeros(world))
    assert all(torch.equal(one, found[0]) for one in found)
    return found[0]


@covered(world=[1, 2, 3, 4], stage=[0, 1, 2, 3], parts=[1, 4])
def test_a_run_has_the_same_bits_on_any_number_of_ranks(world: int, stage: int, parts: int) -> None:
    assert torch.equal(trained(world, stage, parts=parts), trained(1, 0))


def test_the_gradient_of_a_short_batch_is_the_mean_over_its_rows() -> None:
    """A rank may carry logical ranks without a row, and have no row at all."""
    x = torch.arange(1.0, 6.0).reshape(5, 1)

    def step_fn(state: fzero.TrainState, x: Tensor, sizes: list[int]) -> Any:
        reduced = fzero.grad_and_reduce(
            lambda p, x: (p["w"] * x).mean(), state, sizes=sizes, weight=sizes
        )
        state, _ = reduced(x)
        return fzero.apply_gradients(state), None

    step = fzero.shard(step_fn, stage=2, logical_ranks=LOGICAL, seed=0)

    def run(_: Tensor) -> Tensor:
        state = step.init({"w": torch.zeros(1)}, fzero.optim.sgd(1.0))
        order = Order(5, batch_size=1, logical_ranks=LOGICAL, shuffle=False, drop_last=False)
        order = order.after()  # one row is left
        (rows, _after) = next(batches(x, order))
        state, _ = step(state, rows, order.sizes())
        return fzero.full_params(state)["w"]

    for world in (1, 2, 3, 4):
        found = fzero.simulate(run, world_size=world)(torch.zeros(world))
        assert torch.equal(found, torch.full((world, 1), -5.0))
