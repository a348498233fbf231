"""Runs of the same logical ranks are compared by bits: what rounding would hide is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero

LOGICAL = 4
PLACES = [((4, 0), (2, 2)), ((1, 0), (4, 3)), ((2, 3), (1, 1))]


def run(
    ranks: int,
    stage: int,
    after: Callable[[Any], Any] = lambda x: x,
    flips: bool = False,
    **more: Any,
) -> fzero.tools.Run:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 11), nn.Dropout(0.2), nn.Tanh(), nn.Linear(11, 3))
    apply, params = fzero.functionalize(net)

    def step_fn(state: Any, x: Tensor) -> Any:
        turned = flips and len(fzero.logical_ranks()) > 1

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            y = apply(params, x).sin().square().flatten()
            return sum((y.flip(0) if turned else y).unbind(), torch.zeros(()))  # in one order

        for one in x.unbind(1):
            state, loss = fzero.grad_and_reduce(loss_fn, state)(one)
        return after(fzero.apply_gradients(state)), loss

    options = {"logical_ranks": LOGICAL, "seed": 1, **more}
    source = torch.Generator().manual_seed(1)
    return fzero.tools.Run(
        step=fzero.shard(fzero.clip(step_fn, max_norm=0.1), stage=stage, **options),
        params=params,
        optimizer=fzero.optim.adamw(1e-2),
        batches=[torch.randn(12, 2, 6, generator=source).view(ranks, -1, 2, 6) for _ in range(2)],
        world_size=ranks,
    )


@pytest.mark.parametrize(("a", "b"), PLACES)
def test_nothing_is_found_where_bits_are_equal(a: Any, b: Any) -> None:
    assert fzero.diff(run(*a), run(*b)) is None


def _next_number(state: Any) -> Any:
    return fzero.map_params(lambda p: torch.nextafter(p, torch.full_like(p, torch.inf)), state)


def test_one_bit_is_found() -> None:
    found = fzero.diff(run(4, 2), run(2, 2, after=_next_number))
    assert found is not None
    assert (found.operation, found.at.step, found.bound) == ("state", 1, 0.0)
    assert 0 < abs(found.a - found.b) < 1e-7 and found.path == "0.weight"


def test_a_sum_in_another_order_is_found() -> None:
    found = fzero.diff(run(4, 2), run(2, 2, flips=True))
    assert found is not None and (found.operation, found.bound) == ("loss", 0.0)


def test_without_logical_ranks_it_is_rounding() -> None:
    free: dict[str, Any] = {"logical_ranks": None, "seed": 0}
    assert fzero.diff(run(2, 2, **free), run(2, 3, after=_next_number, **free)) is None
