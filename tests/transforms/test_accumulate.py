"""`accumulate(steps=k)`: arguments, aux and updates; that it is one batch is in test_programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError, PhaseError
from tests.oracle import train
from tests.strategies import Pair, integers, same, seeds, stages, worlds
from tests.transforms.steps import mean_loss, one_backward, run, sgd, torch_sgd

IN_PARTS = fzero.accumulate(one_backward, steps=2)
WRAPS: dict[str, Callable[[Any], Any]] = {
    "two parts": fzero.accumulate(steps=2),
    "around coalesce": lambda fn: fzero.accumulate(fzero.coalesce(fn), steps=2),
    "inside coalesce": lambda fn: fzero.coalesce(fzero.accumulate(fn, steps=2)),
}


def echo(state: Any, x: Tensor, pair: Pair, flag: str, *, scale: Tensor, none: None = None) -> Any:
    """Aux of every kind, from arguments of every kind."""
    aux = {
        "mean": x.mean(),
        "count": torch.tensor(len(x)),
        "outputs": 2 * x,
        "pair": Pair(pair.first.sum() / len(x), pair.second),
        "scale": scale,
        "float": x.mean().item(),
        "int": len(x),
        "word": flag,
        "none": none,
        "true": True,
    }
    return state, aux


@given(k=st.sampled_from([1, 2, 3, 6]), seed=seeds)
def test_arguments_are_split_and_aux_is_joined(k: int, seed: int) -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    x = 60 * integers((6, 2), seed)
    pair = Pair(x + 60, "left alone")
    arguments: Any = (x, pair, "word")
    _, want = echo(state, *arguments, scale=torch.tensor(2.0))
    _, got = fzero.accumulate(echo, steps=k)(state, *arguments, scale=torch.tensor(2.0))
    same(got, want)


def test_steps_1_is_the_identity_whatever_the_batch() -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    odd = object()
    new, aux = fzero.accumulate(lambda s, x, o: (s, (x, o)), steps=1)(state, torch.ones(3, 2), odd)
    same(aux[0], torch.ones(3, 2))
    assert aux[1] is odd
    same(new, state)


def two_updates(state: Any, xs: Tensor) -> Any:
    state, _ = one_backward(state, xs)
    return one_backward(state, xs)


def a_gradient_after_the_update(state: Any, xs: Tensor) -> Any:
    state, _ = one_backward(state, xs)
    return fzero.grad_and_reduce(mean_loss, state)(xs)


def two_updates_in_parts(state: Any, xs: Tensor) -> Any:
    state, _ = IN_PARTS(state, xs)
    return IN_PARTS(state, xs)


def an_update_and_one_in_parts(state: Any, xs: Tensor) -> Any:
    state, _ = one_backward(state, xs)
    return IN_PARTS(state, xs)


@pytest.mark.parametrize("outer", ["two parts", "around coalesce", "inside coalesce"])
@pytest.mark.parametrize(
    "fn",
    [two_updates, a_gradient_after_the_update, two_updates_in_parts, an_update_and_one_in_parts],
)
def test_a_step_that_goes_on_after_its_update_is_refused(fn: Any, outer: str) -> None:
    """The update waits for the last part: nothing may be added to its gradients before."""
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    want = one_backward(state, torch.ones(4))
    message = r"after apply_gradients, inside fzero.accumulate[\s\S]*Fix: put fzero.accumul"
    with pytest.raises(PhaseError, match=message):
        WRAPS[outer](fn)(state, torch.ones(4))
    same(one_backward(state, torch.ones(4)), want)  # the state is whole


def test_two_updates_in_parts_after_each_other_are_two_updates() -> None:
    """Without an accumulation around them nothing waits."""
    params, xs = {"w": torch.ones(2).double()}, integers((4,), 1)
    got, _ = two_updates_in_parts(fzero.init(params, sgd(), stage=0), xs)
    same(fzero.full_params(got), train(mean_loss, params, [[xs], [xs]], torch_sgd))


@given(ranks=worlds, stage=stages, seed=seeds)
def test_gradients_before_an_update_in_parts_are_part_of_it(
    ranks: int, stage: int, seed: int
) -> None:
    def step_fn(state: Any, xs: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(mean_loss, state)(xs)
        return IN_PARTS(state, xs)

    def whole(state: Any, xs: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(mean_loss, state)(xs)
        return one_backward(state, xs)

    xs, params = integers((2, ranks, 4), seed, bound=1), {"w": integers((5,), 1)}
    got, _, _ = run(WRAPS["two parts"], step_fn, params, xs, ranks, stage=stage)
    want, _, _ = run(lambda fn: fn, whole, params, xs, ranks, stage=stage)
    same(got, want)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_steps_that_are_no_count_are_refused(steps: Any) -> None:
    with pytest.raises(LayoutError, match=r"accumulate: micro_batches=[\s\S]*Fix: "):
        fzero.accumulate(one_backward, steps=steps)


def test_a_batch_that_does_not_divide_is_named() -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    step = fzero.accumulate(lambda state, a, *, b: (state, None), steps=2)
    message = r"b.* of shape \(3, 2\) does not divide into 2 parts[\s\S]*Fix: use batches of a mult"
    with pytest.raises(LayoutError, match=message):
        step(state, torch.ones(4), b={"deep": torch.ones(3, 2)})


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_behind_the_first_argument_is_named(nested: bool) -> None:
    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    batch = {"teacher": state} if nested else state
    calls: list[Any] = []
    step = fzero.accumulate(lambda state, x, b: (state, calls.append(b)), steps=2)
    place = r"arguments\[0\]\[1\]\['teacher'\]" if nested else r"arguments\[0\]\[1\]"
    message = rf"argument {place} is a TrainState.*\n.*first argument.*\nFix: write step\(state, "
    with pytest.raises(LayoutError, match=message):
        step(state, torch.ones(4), batch)
    assert calls == []


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda i: [torch.ones(1)] * i, "another structure[\\s\\S]*Fix: return the same structure"),
        (lambda i: f"part {i}", "aux differs between parts: 'part 1'[\\s\\S]*Fix: return tensors"),
    ],
)
def test_aux_that_cannot_be_joined_is_refused(aux: Any, message: str) -> None:
    calls = []

    def step_fn(state: Any, x: Tensor) -> Any:
        calls.append(x)
        return state, aux(len(calls))

    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=0)
    with pytest.raises(LayoutError, match=message):
        fzero.accumulate(step_fn, steps=2)(state, torch.ones(4))
