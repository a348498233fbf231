"""A window learns how many backwards it has: the last one is reduced beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import MismatchError
from tests.strategies import integers, stages

LR = 2.0**-6


def model() -> Any:
    made = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        for seed, p in enumerate(made.parameters()):
            p.copy_(integers(tuple(p.shape), seed))
    return made.double()


def loss_of(module: Any, x: Tensor) -> Tensor:
    return module(x).sum()


def engine_of(stage: int, **options: Any) -> Engine:
    module = model()
    return Engine(module, torch.optim.SGD(module.parameters(), LR), stage=stage, **options)


def reductions(log: fzero.CollectiveLog, rank: int) -> int:
    """How often each gradient crossed ranks: of 20 elements."""
    ops = ("all_reduce", "reduce_scatter")
    return sum(e.numel for e in log.of(rank) if e.op in ops and e.numel > 1) // 20


def trained(stage: int, lengths: Sequence[Sequence[int]], x: Tensor, **options: Any) -> Any:
    """An update for each of lengths: backwards of each rank. x: [update, rank, backward, 1, 3]."""

    def body() -> Any:
        rank, engine = fzero.axis_index(), engine_of(stage, **options)
        crossed, early = [], []
        for update, of_ranks in enumerate(lengths):
            with fzero.count_collectives() as log:
                with engine.coalesce():
                    for n in range(of_ranks[rank]):
                        engine.backward(loss_of(engine, x[update, rank, n]))
                    early.append(reductions(log, rank))
                engine.step()
            crossed.append(reductions(log, rank))
        return engine.full_parameters(), torch.tensor(crossed), torch.tensor(early)

    return fzero.simulate(body, world_size=len(lengths[0]))()


def plain(lengths: Sequence[Sequence[int]], x: Tensor) -> dict[str, Tensor]:
    """The same in one process."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for update, of_ranks in enumerate(lengths):
        optimizer.zero_grad()
        for rank, count in enumerate(of_ranks):
            for n in range(count):
                (loss_of(module, x[update, rank, n]) / len(of_ranks)).backward()
        optimizer.step()
    return dict(module.named_parameters())


def batches(updates: int, ranks: int) -> Tensor:
    return integers((updates, ranks, 4, 1, 3), 5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_window_as_long_as_the_last_one_reduces_once_beside_its_last_backward(stage: int) -> None:
    counts = [3, 3, 3, 4, 4, 2, 2]
    lengths = [[n, n] for n in counts]
    x = batches(len(counts), 2)
    params, crossed, early = trained(stage, lengths, x)
    for path, want in plain(lengths, x).items():
        assert all(torch.equal(one, want) for one in params[path])
    for rank in range(2):
        assert crossed[rank].tolist() == [1, 1, 1, 2, 1, 1, 1]  # 4 outgrew 3
        assert early[rank].tolist() == [0, 1, 1, 1, 1, 0, 1]


def test_ordered_reductions_never_guess() -> None:
    lengths = [[2, 2]] * 3
    _, crossed, early = trained(2, lengths, batches(3, 2), ordered=True)
    assert crossed.tolist() == [[1] * 3] * 2 and not early.any()


@given(st.data(), stages)
def test_ranks_with_windows_of_any_lengths_get_the_update_of_one_process(
    data: Any, stage: int
) -> None:
    ranks = data.draw(st.sampled_from([2, 4]))  # means are exact
    alike = st.integers(1, 3).map(lambda n: [n] * ranks)
    any_lengths = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(any)
    one = alike if stage == 3 else st.one_of(alike, any_lengths)
    lengths = data.draw(st.lists(one, min_size=1, max_size=4))
    x = batches(len(lengths), ranks)
    params, _, _ = trained(stage, lengths, x)
    for path, want in plain(lengths, x).items():
        assert all(torch.equal(one, want) for one in params[path])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_block_that_raises_after_its_reduction_brings_nothing(stage: int) -> None:
    def body() -> Any:
        engine = engine_of(stage)
        x = torch.ones(1, 3).double()
        for weight in (1, 1, 5):
            try:
                with engine.coalesce():
                    for _ in range(2):
                        engine.backward(loss_of(engine, x), weight=weight)
                    if weight == 5:
                        raise KeyError
                engine.step()
            except KeyError:
                pass
        with engine.coalesce():
            engine.backward(loss_of(engine, x), weight=1)
        return engine.full_gradients(), engine.full_parameters()

    gradients, params = fzero.simulate(body, world_size=2)()
    alone = model()
    with torch.no_grad():
        for path, p in alone.named_parameters():
            p.copy_(params[path][0])
    loss_of(alone, torch.ones(1, 3).double()).backward()
    for path, p in alone.named_parameters():
        assert torch.equal(gradients[path][0], p.grad), path


def test_a_rank_whose_block_raises_alone_after_a_reduction_is_told_with_the_others() -> None:
    def body() -> Any:
        rank, engine = fzero.axis_index(), engine_of(2)
        x = torch.ones(1, 3).double()
        for update in range(2):
            try:
                with engine.coalesce():
                    engine.backward(loss_of(engine, x))
                    if update and rank:
                        raise KeyError
            except KeyError:
                engine.backward(loss_of(engine, x))
            engine.step()

    with pytest.raises(MismatchError):
        fzero.simulate(body, world_size=2)()
