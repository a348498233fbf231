"""`fzero.logical_mean`: buffers of a functional step, with the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError, PhaseError
from fzero.state.logical import carried
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


SIZES = [3, 1, 2, 0, 2]  # rows of each logical rank


def rows_of(ranks: range) -> torch.Tensor:
    starts = [sum(SIZES[:r]) for r in range(6)]
    return torch.linspace(-1, 2, 8)[starts[ranks.start] : starts[ranks.stop]]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_with_weights_is_their_mean_in_a_step_a_loop_and_outside(stage: int) -> None:
    """One logical rank has no row: its loss is NaN, and counts for nothing."""

    def run() -> Any:
        def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            return (p * x).sin().mean()

        def step_fn(state: Any, x: torch.Tensor, sizes: list[int]) -> Any:
            call = fzero.grad_and_reduce(loss_fn, state, sizes=sizes, weight=sizes)
            state, loss = call(x)
            return fzero.apply_gradients(state), (loss, fzero.psum(len(x), axis="dp"))

        step: Any = fzero.shard(step_fn, stage=stage, logical_ranks=5)
        state = step.init(torch.ones(()), fzero.optim.sgd(0.0))
        mine = state.setup.carried(state.setup.axis.rank)
        x, sizes = rows_of(mine), SIZES[mine.start : mine.stop]
        state, (loss, count) = step(state, x, sizes)
        each = torch.stack([part.sin().mean() for part in x.split(sizes)])
        outside = fzero.logical_mean(each, state, weight=sizes)
        two = fzero.logical_mean(torch.stack([each, 2 * each], 1), state, weight=sizes)

        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        engine, losses = Engine(module, fzero.optim.sgd(0.0), stage=stage, logical_ranks=5), []
        for part in engine.parts(x[:, None], sizes=sizes):
            value = engine(part).sin().mean()
            engine.backward(value, weight=len(part))
            losses.append(value.detach())
        in_loop = fzero.logical_mean(torch.stack(losses), engine.state, weight=sizes)
        engine.close()
        return torch.stack([loss, outside, *two, in_loop]), count

    wanted = torch.linspace(-1, 2, 8, dtype=torch.float64).sin().mean()
    alone, count = run()
    torch.testing.assert_close(alone.double(), wanted * torch.tensor([1, 1, 1, 2, 1]))
    assert count == 8 and (alone[[1, 2, 4]] == alone[0]).all()
    for ranks in (2, 3, 5):
        found, counts = fzero.simulate(run, world_size=ranks)()
        assert all(torch.equal(one, alone) for one in found) and counts.tolist() == [8] * ranks


def test_without_weights_it_is_the_mean_with_the_bits_of_a_step() -> None:
    values = torch.randn(5, generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        state = fzero.init(torch.ones(()), fzero.optim.sgd(1.0), stage=2, logical_ranks=5)
        mine = state.setup.carried(state.setup.axis.rank)
        own = values[mine.start : mine.stop]
        _, loss = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(own)
        plain = fzero.init(torch.ones(()), fzero.optim.sgd(1.0), stage=2)
        of_ranks = fzero.logical_mean(own[:1], plain)  # each rank is one
        return torch.stack([fzero.logical_mean(own, state), loss, of_ranks])

    alone = run()
    assert alone[0] == alone[1] and alone[2] == values[0]
    for ranks in (2, 3):
        every = fzero.simulate(run, world_size=ranks)()
        assert all(torch.equal(one[:2], alone[:2]) for one in every)
        firsts = [values[carried(rank, ranks, 5).start] for rank in range(ranks)]
        torch.testing.assert_close(every[0, 2], torch.stack(firsts).mean())


def test_weights_that_are_all_zero_give_no_number() -> None:
    state = fzero.init(torch.ones(()), fzero.optim.sgd(1.0), stage=0, logical_ranks=2)
    assert fzero.logical_mean(torch.ones(2), state, weight=[0, 0]).isnan()
    assert fzero.logical_mean(torch.tensor([3.0, torch.nan]), state, weight=[5, 0]) == 3


def test_refused() -> None:
    with pytest.raises(PhaseError, match="logical_mean outside of a step with logical ranks"):
        fzero.logical_mean(torch.ones(2))

    plain = fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=0, logical_ranks=2)
    with pytest.raises(PhaseError, match="logical_mean in a loss"):
        fzero.grad_and_reduce(lambda p: fzero.logical_mean(p, plain), plain)()
    with pytest.raises(LayoutError, match=r"shape \[\], and this rank has 2 logical ranks"):
        fzero.logical_mean([torch.ones(()), torch.ones(())], plain)
    with pytest.raises(LayoutError, match=r"shape \[1\], and this rank has 2 logical ranks"):
        fzero.logical_mean(torch.ones(2), plain, weight=[1.0])

    def step_fn(state: Any) -> Any:
        return state, fzero.logical_mean(torch.ones(3))

    step: Any = fzero.shard(step_fn, stage=0, logical_ranks=2)
    state = step.init(torch.ones(2), fzero.optim.sgd(1.0))
    with pytest.raises(LayoutError, match=r"shape \[3\], and this rank has 2 logical ranks"):
        step(state)
