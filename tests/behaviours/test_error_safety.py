"""Behaviour 8: after an error in the middle of a step the state is the one from before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero.state import NAMESPACE
from tests.behaviours.networks import Place, at_every_place
from tests.failing import fails_in_backward
from tests.oracle import square_loss
from tests.strategies import integers, same
from tests.transforms.steps import many_backwards, sgd

PARAMS = {"w": integers((5,), 1), "b": integers((2,), 2)}
RANKS = 2
XS = integers((RANKS, 2), 3)


def _raising_update(grads: Any, state: Any, params: Any) -> Any:
    raise ArithmeticError("in the optimizer")


def in_forward(state: Any, xs: Tensor) -> Any:
    def fails(params: Any, x: Tensor) -> Tensor:
        square_loss(params, x)
        raise ArithmeticError("in forward")

    return fzero.grad_and_reduce(fails, state)(xs[0])


def in_the_forward_of_one_rank(state: Any, xs: Tensor) -> Any:
    fails = fzero.axis_index() == RANKS - 1
    return in_forward(state, xs) if fails else many_backwards(state, xs)


def in_backward(state: Any, xs: Tensor) -> Any:
    def fails(params: Any, x: Tensor) -> Tensor:
        late = fails_in_backward(square_loss(params, x), ArithmeticError("in backward"))
        return late + params["b"].sum()

    return fzero.grad_and_reduce(fails, state)(xs[0])


def in_the_body(state: Any, xs: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(square_loss, state)(xs[0])
    raise ArithmeticError("in the body")


def in_the_update(state: Any, xs: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(square_loss, state)(xs[0])
    setup = state.setup
    broken = fzero.optim.as_optimizer((lambda params: None, _raising_update))
    fields = {name: getattr(setup, name) for name in type(setup).__dataclass_fields__}
    state = state.replace(setup=type(setup)(**fields | {"optimizer": broken}))
    return fzero.apply_gradients(state), None


FAILURES = [in_forward, in_the_forward_of_one_rank, in_backward, in_the_body, in_the_update]


@pytest.mark.parametrize("window", [False, True])
@at_every_place
@pytest.mark.parametrize("failing", FAILURES)
def test_8_after_an_error_the_state_is_the_one_before(
    failing: Callable[..., Any], place: Place, window: bool
) -> None:
    """Twice in a row; the step after it gives what it gives without the error."""

    def world(fn: Callable[..., Any]) -> Any:
        step = fzero.shard(fzero.coalesce(fn) if window else fn, **place)
        return fzero.simulate(step, world_size=RANKS)

    step = world(many_backwards)
    state, _ = step(step.init(PARAMS, sgd()), XS)
    before: Any = optree.tree_map(torch.clone, state, namespace=NAMESPACE)
    want, _ = step(state, XS)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="in ") as caught:
            world(failing)(state, XS)
        if failing is in_the_forward_of_one_rank:
            assert f"virtual rank {RANKS - 1} of {RANKS}" in str(caught.value.__notes__)
        same(state, before)
    same(step(state, XS)[0], want)
