"""Stage 3 gathers a unit before its use and lets it go after the last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.machine.partition import plan_layout
from tests.behaviours.costs import probe_gathers
from tests.behaviours.networks import (
    Gpt,
    Loss,
    Place,
    assert_every_rank,
    at_every_place,
    gradient_on,
    mlp,
    next_token_loss,
    regression,
    squared_loss,
    tokens,
    virtual,
)


def unit_bytes(params: Any, units: Callable[[str], str], ranks: int) -> list[int]:
    """Bytes of each unit, with its padding, largest first."""
    layout = plan_layout(params, ranks=ranks, unit=units)
    numels = (sum(layout.full_numel(i) for i in groups) for groups in layout.units)
    return sorted((8 * numel for numel in numels), reverse=True)


Program = tuple[Any, dict[str, Tensor], Loss, tuple[Tensor, ...], int]  # the last: its units


def an_mlp(ranks: int) -> Program:
    apply, params = fzero.functionalize(mlp(4, 16, 16, 16, 16, 16, 2))
    return apply, params, squared_loss(apply), regression(ranks, 3, 4, 2), 6


def a_transformer(ranks: int) -> Program:
    """Its units are six blocks, the embedding that is the head too, and the last norm."""
    apply, params = fzero.functionalize(Gpt(depth=6))
    return apply, params, next_token_loss(apply), (tokens(ranks),), 8


def an_mlp_in_chosen_units(ranks: int) -> Program:
    """Parts of two layers as units: the bound follows the choice."""
    module = nn.Sequential(OrderedDict(a=mlp(4, 16, 16), b=mlp(16, 16, 16), c=mlp(16, 16, 2)))
    apply, params = fzero.functionalize(module, units=lambda name, part: name in ("a", "b", "c"))
    return apply, params, squared_loss(apply), regression(ranks, 3, 4, 2), 3


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", [an_mlp, a_transformer, an_mlp_in_chosen_units])
def test_no_more_than_the_two_largest_units_are_whole_at_once(
    program: Callable[[int], Program], ranks: int
) -> None:
    """In a coalesced step of two backwards; after each call, and after the step, none is."""
    apply, params, loss, batch, count = program(ranks)

    def step(state: Any, *batch: Tensor) -> tuple[Any, None]:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(loss, state)(*batch)
            assert probe.alive(fzero.axis_index()) == 0
        return fzero.apply_gradients(state), None

    sharded = fzero.simulate(
        fzero.shard(fzero.coalesce(step), stage=3, units=apply.units), world_size=ranks
    )
    state = sharded.init(params, fzero.optim.sgd(0.1))
    with probe_gathers() as probe:
        sharded(state, *batch)
    units = unit_bytes(params, apply.units, ranks)
    assert len(units) == count
    for rank in range(ranks):
        assert units[0] <= probe.peak(rank) <= units[0] + units[1] < sum(units)
        assert probe.alive(rank) == 0


def shared_loss(params: Any, x: Tensor) -> Tensor:
    """One layer three times, one that is never used, a relu without parameters between them."""
    for _ in range(3):
        x = F.relu(x @ params["twice"].T + params["bias"])
    return x.square().mean()


def expert_loss(params: Any, x: Tensor) -> Tensor:
    """The weight's input needs no gradient, and each rank takes another one."""
    return torch.tanh(x @ params[f"expert{fzero.axis_index()}"]).sum() + 0 * params["bias"].sum()


def remat_loss(params: Any, x: Tensor) -> Tensor:
    """Recomputed, with random numbers inside."""
    block = fzero.remat(lambda p, h: torch.tanh(F.dropout(h, 0.5) @ p["twice"] + p["bias"]))
    for _ in range(2):
        x = block(params, x)
    return x.square().mean()


@at_every_place
@pytest.mark.parametrize("loss", [shared_loss, expert_loss, remat_loss])
def test_layers_that_are_used_again_are_right_and_released(loss: Loss, place: Place) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = dict.fromkeys(("twice", "expert0", "expert1", "unused"), (5, 5)) | {"bias": (5,)}
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }

    def alone(x: Tensor) -> dict[str, Tensor]:
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        found = torch.autograd.grad(
            loss(leaves, x), [*leaves.values()], allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, found, strict=True))

    x = regression(2, 3, 5, 1)[0]
    torch.manual_seed(5)
    want = virtual(alone, 2, x)  # by plain autograd, for the rank's index and its random state
    torch.manual_seed(5)
    with probe_gathers() as probe:
        got = gradient_on(loss, params, x, **place)
    assert probe.alive(0) == probe.alive(1) == 0
    assert_every_rank(got, {name: rows.mean(0) for name, rows in want.items()})
