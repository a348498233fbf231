"""What an update depends on is the same on every rank, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError, MismatchError
from tests.adapter.experts import (
    X,
    moved,
    stepping,
)


def test_an_error_of_one_rank_at_its_update_ends_the_others() -> None:
    def body(engine: Engine, rank: int) -> None:
        engine(X, [0]).backward()
        before = engine.full_parameters()
        if rank == 0:
            engine.module.stem.weight.data = torch.zeros(3, 3, dtype=torch.float64)
        with pytest.raises((LayoutError, fzero.errors.PeerFailedError)):
            engine.step()
        assert moved(engine, before) <= {"stem"}  # by the user

    stepping(1, body)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_one_rank_threw_away_raise_on_all(stage: int) -> None:
    def body(engine: Engine, rank: int) -> None:
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

    stepping(stage, body)


def set_of(group: int, **options: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.param_groups[group].update(options)


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
        (
            lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0).step(1.0),
            None,
        ),
    ],
)
def test_what_the_optimizer_has_on_one_rank_only_raises_on_all(
    stage: int, change: Callable[[Any], None], seen: str | None
) -> None:
    def body(engine: Engine, rank: int) -> None:
        engine(X, [0]).backward()
        before = engine.full_parameters()
        if rank:
            change(engine.optimizer)
        if seen is None:  # nothing that an update depends on
            engine.step()
            return
        with pytest.raises(MismatchError, match=seen):
            engine.step()
        assert moved(engine, before) == set() and int(engine.state.step) == 0

    stepping(stage, body)


def test_a_schedule_that_follows_the_loss_of_one_rank_raises_on_all() -> None:
    def body(engine: Engine, rank: int) -> None:
        assert engine.optimizer is not None
        rates = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        step = partial(engine.backward, gradient=None)
        for update in range(2):
            step(engine(X, [0, 1, 2, 3]))
            if update:
                with pytest.raises(
                    MismatchError, match=r"step\(\) of engine .* with param group 0"
                ):
                    engine.step()
            else:
                engine.step()
            rates.step(1.0)
            rates.step(1.0 - rank)  # better on rank 1 alone

    stepping(2, body)
