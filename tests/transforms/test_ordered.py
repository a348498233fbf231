"""`ordered=True`: each reduction sums in rank order, which shows if a gradient crosses in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError
from tests.failing import fails_in_backward

RANKS, UNITS, SIZE = 3, 4, 129
IN_ORDER = [[0, 1, 2, 3]] * RANKS
OTHER_ORDERS = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]]


def draw(number: int) -> Tensor:
    """[units, SIZE]"""
    return torch.randn(UNITS, SIZE, generator=torch.Generator().manual_seed(number))


PARAMS = {f"layers.{i}": w for i, w in enumerate(draw(99))}


def contribution(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).tanh().sum()


def loss_of(params: Any, x: Tensor, walk: list[int], fails: bool) -> Tensor:
    """`params`: of one model, or of two that have every other unit."""
    models = params if isinstance(params, list) else [params]
    total = x.new_zeros(())
    for number, i in enumerate(walk):
        one = contribution(models[i % len(models)][f"layers.{i}"], x[i])
        total = total + (fails_in_backward(one, KeyError) if fails and number == 1 else one)
    return total


def in_rank_order(update: int) -> dict[str, Tensor]:
    found = {}
    for i, (path, w) in enumerate(PARAMS.items()):
        total = torch.zeros(SIZE)
        for rank in range(RANKS):
            own = w.clone().requires_grad_()
            contribution(own, draw(10 * update + rank)[i]).backward()
            assert own.grad is not None
            total = total + own.grad if rank else own.grad
        found[path] = total / RANKS
    return found


def passes(
    stage: int, walks: list[list[int]], *, models: int, fails: bool
) -> list[dict[str, Tensor]]:
    """The gradients of two passes, as rank 0 has them; rank 1 fails in the first try of each."""
    found: list[dict[str, Tensor]] = []

    def each(_: Tensor) -> None:
        rank = fzero.axis_index()
        parts = [dict(list(PARAMS.items())[k::models]) for k in range(models)]
        options: Any = (
            {"stage": stage, "ordered": True, "bucket_bytes": 1 << 10}
            if stage < 3
            else {"stage": 3, "ordered": True}
        )
        states = [fzero.init(part, fzero.optim.sgd(0.0), **options) for part in parts]
        state: Any = states if models > 1 else states[0]
        for update in range(2):
            x = draw(10 * update + rank)
            if fails:
                with pytest.raises(KeyError if rank == 1 else AxisError):
                    fzero.grad_and_reduce(loss_of, state)(x, walks[rank], rank == 1)
            after, _ = fzero.grad_and_reduce(loss_of, state)(x, walks[rank], False)
            whole = fzero.gradients(after)
            state = fzero.apply_gradients(after)
            if rank == 0:
                found.append(
                    {k: g for part in (whole if models > 1 else [whole]) for k, g in part.items()}
                )

    fzero.simulate(each, world_size=RANKS)(torch.zeros(RANKS, 1))
    return found


@pytest.mark.parametrize(
    ("stage", "walks", "models", "fails"),
    [
        (0, OTHER_ORDERS, 2, True),
        (2, OTHER_ORDERS, 1, True),
        (2, IN_ORDER, 2, False),
        (3, IN_ORDER, 1, True),
        (3, IN_ORDER, 2, True),
    ],
)
def test_every_element_is_summed_in_rank_order(
    stage: int, walks: list[list[int]], models: int, fails: bool
) -> None:
    for update, found in enumerate(passes(stage, walks, models=models, fails=fails)):
        wanted = in_rank_order(update)
        assert all(torch.equal(found[path], wanted[path]) for path in PARAMS)


@pytest.mark.parametrize("models", [1, 2])
def test_at_stage_3_ranks_that_use_units_in_other_orders_sum_within_rounding(models: int) -> None:
    found = passes(3, OTHER_ORDERS, models=models, fails=True)
    for update, gradients in enumerate(found):
        wanted = in_rank_order(update)
        for path in PARAMS:
            torch.testing.assert_close(gradients[path], wanted[path], rtol=0, atol=2.0**-22)
    first = in_rank_order(0)
    assert any(not torch.equal(found[0][path], first[path]) for path in PARAMS)  # as said in docs
