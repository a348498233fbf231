"""What an update depends on is the same on every rank, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.errors import LayoutError, MismatchError
from tests.adapter.experts import X, moved, stepping
from tests.adapter.on_ranks import virtually


@virtually(2)
def test_an_error_of_one_rank_at_its_update_ends_the_others(rank: int) -> None:
    engine = stepping(1)
    engine(X, [0]).backward()
    before = engine.full_parameters()
    if rank == 0:
        engine.module.stem.weight.data = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises((LayoutError, fzero.errors.PeerFailedError)):
        engine.step()
    assert moved(engine, before) <= {"stem"}  # by the user


@virtually(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_one_rank_threw_away_raise_on_all(rank: int, stage: int) -> None:
    engine = stepping(stage)
    engine(X, [0]).backward()
    before = engine.full_parameters()
    if rank:
        engine.module.zero_grad()
    with pytest.raises(MismatchError, match="holds reduced gradients, and rank 1 holds none"):
        engine.step()
    assert moved(engine, before) == set()
    engine.zero_grad()
    engine(X, [0]).backward()
    engine.step()
    assert moved(engine, before) == {"stem", "head", "0"}


def set_of(group: int, **options: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.param_groups[group].update(options)


def plateau(optimizer: Any) -> None:
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0).step(1.0)


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (set_of(0, lr=0.25), "lr=0.25"),
        (set_of(1, weight_decay=0.125), "weight_decay=0.125"),
        (set_of(1, betas=[0.5, 0.75]), "betas="),
        (set_of(0, lr=torch.tensor(0.5)), r"lr=tensor\(0.5\)"),
        (set_of(0, maximize=True), "maximize=True"),
        (lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "param group 2"),
        (plateau, None),
    ],
)
def test_what_the_optimizer_has_on_one_rank_only_raises_on_all(
    rank: int, stage: int, change: Callable[[Any], None], seen: str | None
) -> None:
    engine = stepping(stage)
    engine(X, [0]).backward()
    before = engine.full_parameters()
    if rank:
        change(engine.optimizer)
    if seen is None:  # nothing that an update depends on
        assert engine.step()
        return
    with pytest.raises(MismatchError, match=seen):
        engine.step()
    assert moved(engine, before) == set() and int(engine.state.step) == 0


@virtually(2)
def test_a_schedule_that_follows_the_loss_of_one_rank_raises_on_all(rank: int) -> None:
    engine = stepping(2)
    assert engine.optimizer is not None
    rates = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
    engine.backward(engine(X, [0, 1, 2, 3]))
    engine.step()
    rates.step(1.0)
    rates.step(1.0 - rank)  # better on rank 1 alone
    engine.backward(engine(X, [0, 1, 2, 3]))
    with pytest.raises(MismatchError, match=r"step\(\) of engine .* with param group 0"):
        engine.step()
