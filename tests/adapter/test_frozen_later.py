"""A parameter that is frozen while an engine is open does not move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fzero.adapter import Engine
from fzero.errors import LayoutError, PhaseError
from tests.adapter.experts import (
    X,
    adamw,
    close_to,
    made,
    momentum,
    moved,
    on_virtual_ranks,
    stepping,
)
from tests.adapter.on_ranks import each_stage


@each_stage
@pytest.mark.parametrize("optimizer_of", [adamw, momentum])
def test_what_is_frozen_between_steps_does_not_move_and_learns_again_later(
    stage: int, optimizer_of: Callable[..., Any]
) -> None:
    frozen = {1: False, 3: True}  # from which update on the stem requires grad, or not

    def body(rank: int) -> None:
        module, twin = made(), made()
        engine, optimizer = Engine(module, optimizer_of(module), stage=stage), optimizer_of(twin)
        for update in range(5):
            for one in (module, twin):
                for p in one.stem.parameters():
                    p.requires_grad_(frozen.get(update, p.requires_grad))
            optimizer.zero_grad()
            twin(X, [update % 2]).backward()
            optimizer.step()
            engine(X, [update % 2]).backward()
            engine.step()
            close_to(engine.full_parameters(), dict(twin.named_parameters()))

    on_virtual_ranks(2, body)


def test_what_one_rank_alone_freezes_learns_from_the_others() -> None:
    def body(engine: Engine, rank: int) -> None:
        engine.module.stem.requires_grad_(rank == 0)
        before = engine.full_parameters()
        engine(X, []).backward()
        engine.step()
        assert moved(engine, before) == {"stem", "head"}

    stepping(2, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_frozen_between_the_backward_and_the_update_has_its_gradient(stage: int) -> None:
    def body(engine: Engine, rank: int) -> None:
        before = engine.full_parameters()
        engine(X, []).backward()
        engine.module.requires_grad_(False)
        engine.step()
        assert moved(engine, before) == {"stem", "head"}

    stepping(stage, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_unfreezing_and_new_groups_are_refused_on_every_rank_and_change_nothing(
    stage: int,
) -> None:
    def body(rank: int) -> None:
        module = made()
        module.experts.requires_grad_(False)
        optimizer = torch.optim.AdamW([*module.stem.parameters(), *module.head.parameters()])
        engine = Engine(module, optimizer, stage=stage)
        before = engine.full_parameters()
        engine(X, [0]).backward()
        module.experts[0].requires_grad_(True)
        with pytest.raises(LayoutError, match=r"experts.0.weight requires grad now"):
            engine.step()
        module.experts[0].requires_grad_(False)
        optimizer.add_param_group({"params": [module.experts[0].weight]})
        with pytest.raises(PhaseError, match=r"has 2 param groups"):
            engine.step()
        del optimizer.param_groups[1]
        assert moved(engine, before) == set()
        engine.step()
        assert moved(engine, before) == {"stem", "head"}

    on_virtual_ranks(2, body)


def test_a_gradient_by_hand_that_no_backward_brought_is_not_lost_in_silence() -> None:
    module = made()
    engine = Engine(module, adamw(module), stage=2)
    module.stem.weight.grad = torch.ones_like(module.stem.weight)
    with pytest.raises(LayoutError, match=r"p.grad of stem.weight"):
        engine.step()
    engine.zero_grad()
    assert engine.step() is True
