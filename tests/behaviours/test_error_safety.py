"""Behaviour 8: after an error in the middle of a step the state is the one from before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.behaviours.contents import PARAMS, RANKS, X, contents, good_step, loss, same
from tests.behaviours.networks import PLACES, virtual
from tests.failing import fails_in_backward


def _raising_update(grads: Any, state: Any, params: Any) -> Any:
    raise ArithmeticError("in the optimizer")


def in_forward(state: Any, x: Tensor) -> Any:
    def fails(params: Any, x: Tensor) -> Tensor:
        loss(params, x)
        raise ArithmeticError("in forward")

    return fzero.grad_and_reduce(fails, state)(x)


def in_backward(state: Any, x: Tensor) -> Any:
    def fails(params: Any, x: Tensor) -> Tensor:
        return (
            fails_in_backward(loss(params, x), ArithmeticError("in backward")) + params["b"].sum()
        )

    return fzero.grad_and_reduce(fails, state)(x)


def in_the_body(state: Any, x: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(loss, state)(x)
    raise ArithmeticError("in the body")


def in_the_update(state: Any, x: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(loss, state)(x)
    setup = state.setup
    broken = fzero.optim.as_optimizer((lambda params: None, _raising_update))
    fields = {name: getattr(setup, name) for name in type(setup).__dataclass_fields__}
    state = state.replace(setup=type(setup)(**fields | {"optimizer": broken}))
    return fzero.apply_gradients(state), None


FAILURES = [in_forward, in_backward, in_the_body, in_the_update]


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("failing", FAILURES)
def test_8_after_an_error_the_state_is_the_one_before(
    failing: Callable[..., Any], stage: int, reshard: Any, window: bool
) -> None:
    """Twice in a row; the step after it gives what it gives without the error."""
    wrap = fzero.coalesce if window else lambda fn: fn

    def world(fn: Callable[..., Any]) -> Any:
        return fzero.simulate(
            fzero.shard(wrap(fn), stage=stage, reshard_after_forward=reshard), world_size=RANKS
        )

    step = world(good_step)
    state, _ = step(step.init(PARAMS, fzero.optim.sgd(0.5, momentum=0.5)), X)
    want = contents(step(state, X)[0])
    before = contents(state)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="in "):
            world(failing)(state, X)
        assert same(contents(state), before)
    assert same(contents(step(state, X)[0]), want)


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_8_a_caught_error_inside_a_step_loses_nothing(stage: int, reshard: Any) -> None:
    """All ranks catch it, and go on in the same step."""

    def step(state: Any, x: Tensor) -> tuple[Any, None]:
        state, _ = fzero.grad_and_reduce(loss, state)(x)
        for failing in (in_forward, in_backward):
            with pytest.raises(ArithmeticError):
                failing(state, x)
        return good_step(state, x)[0], None

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, reshard_after_forward=reshard)
        state, _ = fzero.coalesce(step)(state, x)
        return fzero.full_params(state)

    after = virtual(run, RANKS, X)
    assert torch.equal(after["w"], torch.full((RANKS, 5), 1 - 0.5 * 2 * 2.0))
    assert torch.equal(after["b"], torch.full((RANKS, 2), 1 - 0.5 * 2 * 2.0))


@pytest.mark.parametrize("raiser", range(RANKS))
@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_8_an_error_on_one_rank_ends_all_with_that_error(
    stage: int, reshard: Any, raiser: int
) -> None:
    def fails(params: Any, x: Tensor) -> Tensor:
        if fzero.axis_index() == raiser:
            raise ArithmeticError("only here")
        return loss(params, x)

    def step(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(fails, state)(x)

    sharded = fzero.simulate(
        fzero.shard(step, stage=stage, reshard_after_forward=reshard), world_size=RANKS
    )
    state = sharded.init(PARAMS, fzero.optim.sgd(0.5))
    before = contents(state)
    with pytest.raises(ArithmeticError, match="only here") as caught:
        sharded(state, X)
    assert f"virtual rank {raiser} of {RANKS}" in str(caught.value.__notes__)
    assert same(contents(state), before)
