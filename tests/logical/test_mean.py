"""`fzero.logical_mean`: buffers of a functional step, with the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import nn

import fzero
from fzero.errors import LayoutError, PhaseError
from tests.logical.programs import FEATURES, differs


def trained(ranks: int, stage: int) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7))
    apply, params, first = fzero.functionalize(module, buffers=True)

    def loss_fn(p: Any, x: torch.Tensor, buffers: Any) -> Any:
        y, new = apply(p, x, buffers=buffers)
        return y.sin().square().mean(), new

    def step_fn(state: Any, x: torch.Tensor, buffers: Any) -> Any:
        call = fzero.grad_and_reduce(loss_fn, state, has_aux=True, in_axes=(0, None))
        state, (loss, new) = call(x, buffers)
        return fzero.apply_gradients(state), (loss, fzero.logical_mean(new))

    def run() -> Any:
        step: Any = fzero.shard(step_fn, stage=stage, logical_ranks=5)
        state, buffers, losses = step.init(params, fzero.optim.adamw(1e-2)), first, []
        mine = state.setup.carried(state.setup.axis.rank)
        generator = torch.Generator().manual_seed(3)
        for batch in torch.randn(3, 5, 4, FEATURES, generator=generator):
            rows = batch[mine.start : mine.stop].flatten(0, 1)
            state, (loss, buffers) = step(state, rows, buffers)
            losses.append(loss)
        return fzero.full_params(state), buffers, torch.stack(losses)

    if ranks == 1:
        return run()
    every: Any = fzero.simulate(run, world_size=ranks)()
    return optree.tree_map(lambda x: x[0], every, namespace="fzero")


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (3, 3), (5, 2)])
def test_buffers_have_the_same_bits(ranks: int, stage: int) -> None:
    assert differs(trained(1, 0), trained(ranks, stage)) == []


def test_refused() -> None:
    with pytest.raises(PhaseError, match="logical_mean outside of a step with logical ranks"):
        fzero.logical_mean(torch.ones(2))

    def step_fn(state: Any) -> Any:
        return state, fzero.logical_mean(torch.ones(3))

    step: Any = fzero.shard(step_fn, stage=0, logical_ranks=2)
    state = step.init(torch.ones(2), fzero.optim.sgd(1.0))
    with pytest.raises(LayoutError, match=r"shape \[3\], and this rank has 2 logical ranks"):
        step(state)
