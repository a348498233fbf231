"""Collectives take the axis as nothing, as its name, or as itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError

COLLECTIVES: dict[str, Any] = {
    "psum": fzero.psum,
    "pmean": fzero.pmean,
    "all_reduce": fzero.all_reduce,
    "all_gather": fzero.all_gather,
    "reduce_scatter": fzero.reduce_scatter,
    "psum_scatter": fzero.psum_scatter,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_name_of_the_axis_is_the_axis(name: str) -> None:
    collective, xs = COLLECTIVES[name], torch.arange(8.0).view(2, 4)
    want = fzero.simulate(collective, world_size=2)(xs)
    by_name = fzero.simulate(lambda x: collective(x, "dp"), world_size=2)(xs)
    by_axis = fzero.simulate(lambda x: collective(x, axis=fzero.world()), world_size=2)(xs)
    assert torch.equal(by_name, want) and torch.equal(by_axis, want)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("axis", ["tp", 0, "", object()])
def test_another_name_is_refused_with_the_one_there_is(name: str, axis: Any) -> None:
    with pytest.raises(AxisError, match=r"axis=.*, and the axis here is axis 'dp' \(local, 1 rank"):
        COLLECTIVES[name](torch.ones(2), axis)


def test_in_a_loss_the_axis_is_that_of_the_state() -> None:
    mesh = fzero.Axis(name="shard", size=1)
    state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=2, mesh=mesh)

    def gradient(name: str) -> Tensor:
        new, _ = fzero.grad_and_reduce(lambda p: fzero.psum(p["w"].sum(), name), state)()
        return fzero.gradients(new)["w"]

    assert gradient("shard").tolist() == [1.0, 1.0]
    with pytest.raises(AxisError, match=r"axis='dp', and the axis here is axis 'shard'"):
        gradient("dp")
