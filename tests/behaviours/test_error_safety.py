"""After an error in the middle of a step the state is the one from before.

Errors of the step and of the forward are in test_interleavings.py, those of one rank of several in
gloo/test_failures.py.
"""

from __future__ import annotations

import dataclasses
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


def in_backward(state: Any, xs: Tensor) -> Any:
    def fails(params: Any, x: Tensor) -> Tensor:
        late = fails_in_backward(square_loss(params, x), ArithmeticError("in backward"))
        return late + params["b"].sum()

    return fzero.grad_and_reduce(fails, state)(xs[0])


def in_the_update(state: Any, xs: Tensor) -> Any:
    def update(grads: Any, state: Any, params: Any) -> Any:
        raise ArithmeticError("in the optimizer")

    state, _ = fzero.grad_and_reduce(square_loss, state)(xs[0])
    optimizer: Any = fzero.optim.as_optimizer((lambda params: None, update))
    # It worked when the state was made: its trial, which fails now, found it elementwise.
    optimizer = dataclasses.replace(optimizer, elementwise=True)
    setup = dataclasses.replace(state.setup, optimizer=optimizer)
    return fzero.apply_gradients(state.replace(setup=setup)), None


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("window", [False, True])
@at_every_place
@pytest.mark.parametrize("failing", [in_backward, in_the_update])
def test_after_an_error_the_state_is_the_one_before(
    failing: Callable[..., Any], place: Place, window: bool, donate: bool
) -> None:
    """Twice in a row; the step after it gives what it gives without the error."""

    def world(fn: Callable[..., Any], **options: Any) -> Any:
        step = fzero.shard(fzero.coalesce(fn) if window else fn, **place, **options)
        return fzero.simulate(step, world_size=RANKS)

    step = world(many_backwards)
    state, _ = step(step.init(PARAMS, sgd()), XS)
    before: Any = optree.tree_map(torch.clone, state, namespace=NAMESPACE)
    want, _ = step(state, XS)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="in "):
            world(failing, donate=donate)(state, XS)
        same(state, before)
    same(step(state, XS)[0], want)
