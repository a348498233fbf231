"""A parameter that is frozen while an engine is open does not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fzero.errors import LayoutError, PhaseError
from tests.adapter.experts import Experts, X, adamw, close_to, momentum, moved, stepping
from tests.adapter.on_ranks import each_stage, virtually


@virtually(2)
@each_stage
@pytest.mark.parametrize("optimizer_of", [adamw, momentum])
def test_what_is_frozen_between_steps_does_not_move_and_learns_again_later(
    stage: int, optimizer_of: Any
) -> None:
    frozen = {1: False, 3: True}  # from which update on the stem requires grad, or not
    engine, twin = stepping(stage, optimizer_of), Experts()
    optimizer = optimizer_of(twin)
    for update in range(5):
        for p in (*engine.module.stem.parameters(), *twin.stem.parameters()):
            p.requires_grad_(frozen.get(update, p.requires_grad))
        optimizer.zero_grad()
        twin(X, [update % 2]).backward()
        optimizer.step()
        engine(X, [update % 2]).backward()
        engine.step()
        close_to(engine.full_parameters(), dict(twin.named_parameters()))


@virtually(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("when", ["on rank 1 alone", "between the backward and the update"])
def test_what_has_a_gradient_is_stepped_though_it_is_frozen(
    rank: int, stage: int, when: str
) -> None:
    engine = stepping(stage)
    before = engine.full_parameters()
    engine.module.stem.requires_grad_(rank == 0 or when != "on rank 1 alone")
    engine(X, []).backward()
    engine.module.requires_grad_(when == "on rank 1 alone" and rank == 0)
    engine.step()
    assert moved(engine, before) == {"stem", "head"}


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_unfreezing_and_new_groups_are_refused_on_every_rank_and_change_nothing(
    stage: int,
) -> None:
    def of_some(module: Any) -> torch.optim.Optimizer:
        module.experts.requires_grad_(False)
        return torch.optim.AdamW([*module.stem.parameters(), *module.head.parameters()])

    engine = stepping(stage, of_some)
    experts: Any = engine.module.experts
    optimizer, before = engine.optimizer, engine.full_parameters()
    assert optimizer is not None
    engine(X, [0]).backward()
    experts[0].requires_grad_(True)
    with pytest.raises(LayoutError, match=r"experts.0.weight requires grad now"):
        engine.step()
    experts[0].requires_grad_(False)
    optimizer.add_param_group({"params": [experts[0].weight]})
    with pytest.raises(PhaseError, match=r"has 2 param groups"):
        engine.step()
    del optimizer.param_groups[1]
    assert moved(engine, before) == set()
    engine.step()
    assert moved(engine, before) == {"stem", "head"}


def test_a_gradient_by_hand_that_no_backward_brought_is_a_gradient() -> None:
    engine = stepping(2)
    before = engine.full_parameters()
    stem: Any = engine.module.stem
    stem.weight.grad = torch.ones_like(stem.weight)
    assert engine.step() is True
    assert moved(engine, before) == {"stem"}
