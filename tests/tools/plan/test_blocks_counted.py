"""A plan counts the padding of blocks, as ranks have it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import fzero
from fzero.ranks.virtual import run_ranks
from tests.optim.any_ranks import blocks


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (2, 3), (3, 2)])
def test_the_bytes_of_a_plan_are_those_of_ranks(stage: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(37, 45), nn.Linear(45, 5))
    adamw = partial(fzero.optim.adamw, 1e-2)

    def planned() -> dict[str, int]:
        plan = fzero.plan(model, torch.ones(2, 37), stage=stage, world=world, optimizer=adamw())
        return {kind: plan.bytes[kind] for kind in ("parameters", "optimizer")}

    def body(rank: int) -> dict[str, int]:
        params = fzero.functionalize(model)[1]
        held = fzero.state_bytes(fzero.init(params, adamw(), stage=stage))
        return {kind: held[kind] for kind in ("parameters", "optimizer")}

    without = planned()
    with blocks():
        counted, ranks = planned(), run_ranks(body, world)
    assert ranks == [counted] * world
    assert counted["parameters"] > without["parameters"]
