"""A gradient that was made elsewhere counts like one that a backward brought."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import LayoutError
from tests.covering import covered

PARAMS = {"w": torch.arange(5.0), "b": torch.ones(2, 2), "frozen": torch.ones(3, dtype=torch.int64)}


def loss(params: Any, x: Tensor) -> Tensor:
    return x * (params["w"] ** 2).sum() + x * params["b"].sum()


def made_by_hand(params: Any, x: Tensor) -> Any:
    return {"w": 2 * x * params["w"], "b": x * torch.ones(2, 2), "frozen": None}


def by_backward(state: Any, x: Tensor) -> Any:
    return fzero.grad_and_reduce(loss, state)(x)[0]


def by_hand(state: Any, x: Tensor) -> Any:
    return fzero.add_gradients(state, made_by_hand(fzero.full_params(state), x))


@covered(window=[False, True], ranks=[1, 2, 3], stage=range(4))
def test_a_gradient_by_hand_equals_that_of_a_backward(stage: int, ranks: int, window: bool) -> None:
    """Local ones are averaged over ranks, wait in a window, and add up with those of backwards."""

    def run(x: Tensor, add: Any) -> Any:
        def step(state: Any, x: Tensor) -> tuple[Any, None]:
            state = add(by_backward(state, x), 2 * x)
            return fzero.apply_gradients(state), None

        sharded = fzero.shard(fzero.coalesce(step) if window else step, stage=stage)
        state = sharded.init(PARAMS, fzero.optim.sgd(0.125))
        return fzero.full_params(sharded(state, x)[0])

    xs = torch.arange(1.0, ranks + 1)
    got, want = (
        fzero.simulate(lambda x, add=add: run(x, add), world_size=ranks)(xs)
        for add in (by_hand, by_backward)
    )
    assert torch.equal(got["w"], want["w"])
    assert torch.equal(got["b"], want["b"])


@pytest.mark.parametrize("stage", range(4))
def test_a_reduced_gradient_is_taken_as_it_is(stage: int) -> None:
    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=stage)
        grads = {"w": torch.full((5,), 4.0), "b": torch.zeros(2, 2), "frozen": None}
        return fzero.gradients(fzero.add_gradients(state, grads, reduced=True))

    got = fzero.simulate(run, world_size=2)(torch.zeros(2))
    assert torch.equal(got["w"], torch.full((2, 5), 4.0))


def test_what_does_not_fit_is_refused_by_name() -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(1.0), stage=1)
    whole = made_by_hand(PARAMS, torch.ones(()))
    with pytest.raises(LayoutError, match=r"gradient of w has shape \(8, 5\)[\s\S]*Fix: "):
        fzero.add_gradients(state, whole | {"w": torch.ones(8, 5)})
    one = fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=1)
    with pytest.raises(LayoutError, match="the gradient of the parameter has shape"):
        fzero.add_gradients(one, torch.ones(3))
    with pytest.raises(LayoutError, match=r"have the structure[\s\S]*Fix: "):
        fzero.add_gradients(state, {"w": torch.ones(5)})

    @fzero.coalesce
    def step(state: Any) -> tuple[Any, None]:
        return fzero.add_gradients(state, whole, reduced=True), None

    with pytest.raises(LayoutError, match=r"reduced gradient inside a coalescing window"):
        step(state)
