"""`clip` uses the true norm: each element once, over all shards; padding and replicas never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.covering import covered
from tests.descends import descends
from tests.oracle import mean_gradient
from tests.strategies import integers, seeds, stages, trees, unique, worlds
from tests.transforms.steps import mean_loss, run


@given(
    tree=trees((torch.float64,), learning=True),
    ranks=worlds,
    stage=stages,
    windows=st.booleans(),
    seed=seeds,
)
def test_the_norm_is_that_of_the_unsharded_gradient(
    tree: Any, ranks: int, stage: int, windows: bool, seed: int
) -> None:
    """Of the mean over ranks; tied leaves count once, frozen ones and padding never."""

    def step_fn(state: Any, xs: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(mean_loss, state)(xs)
        state, _ = fzero.grad_and_reduce(mean_loss, state)(-2 * xs)
        norm, backwards = fzero.global_norm(state), state.progress.backwards
        assert fzero.global_norm(state) == norm  # reading it changes nothing
        assert state.progress.backwards == backwards
        return fzero.apply_gradients(state), norm

    def summed_loss(params: Any, xs: Tensor) -> Tensor:
        return mean_loss(params, xs) + mean_loss(params, -2 * xs)

    xs = integers((ranks, 2), seed, bound=1)
    wrap: Any = fzero.coalesce if windows else lambda fn: fn
    _, _, norms = run(wrap, step_fn, tree, [xs], ranks, stage=stage)
    grads = [g.reshape(-1) for g in unique(mean_gradient(summed_loss, tree, list(xs)))]
    norm = torch.cat(grads).norm() if grads else torch.zeros(())
    torch.testing.assert_close(norms.double(), norm.double().expand(ranks))


@covered(outer=[1.0, 2.0, None], inner=[1.0, 2.0, None])
def test_of_two_bounds_the_smaller_holds_in_either_order(
    outer: float | None, inner: float | None
) -> None:
    def one(state: Any) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: 10 * p.sum(), state)()
        return fzero.apply_gradients(state), loss

    step = fzero.clip(fzero.clip(one, max_norm=inner), max_norm=outer)
    state, _ = step(fzero.init(torch.zeros(1), fzero.optim.sgd(1.0), stage=0))
    bound = min([b for b in (outer, inner) if b is not None], default=10.0)
    torch.testing.assert_close(fzero.full_params(state), torch.tensor([-bound]))


def test_16_bit_gradients_have_their_norm_in_fp32() -> None:
    params = torch.zeros(4096, dtype=torch.bfloat16)
    state = fzero.init(params, fzero.optim.sgd(1.0), stage=2)
    state, _ = fzero.grad_and_reduce(lambda p: 300 * p.float().sum(), state)()
    norm = fzero.global_norm(state)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(300.0 * 64, rel=1e-3)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), "1", True])
def test_a_bound_that_is_no_positive_number_is_refused(max_norm: Any) -> None:
    with pytest.raises(LayoutError, match=r"clip: max_norm=[\s\S]*Fix: give None to switch it off"):
        fzero.clip(lambda state: (state, None), max_norm=max_norm)


def test_leaves_that_nobody_used_add_nothing_to_the_norm() -> None:
    params = {"used": torch.ones(3), "unused": torch.ones(2), "empty": torch.zeros(0)}
    state = fzero.init(params, fzero.optim.sgd(1.0), stage=2)
    state, _ = fzero.grad_and_reduce(lambda p: p["empty"].sum(), state)()
    assert fzero.global_norm(state) == 0.0
    state, _ = fzero.grad_and_reduce(lambda p: 4 * p["used"][:1].sum(), state)()
    assert fzero.global_norm(state) == 4.0


@covered(stage=[0, 2, 3], inside=["alone", "loss scale", "accumulate", "max_norm"])
def test_max_value_bounds_each_element_of_the_mean_gradient_as_clip_grad_value_does(
    stage: int, inside: str
) -> None:
    """Not of each rank's own gradient: those are 8 and -4 times the row, and would cancel."""
    row, ranks = torch.tensor([0.5, -3.0, 0.0, 1.0, 4.0], dtype=torch.float64), 2
    factors = torch.tensor([8.0, -4.0], dtype=torch.float64)

    one = descends(lambda p, x: (p * row).sum() * x.sum())
    wraps: dict[str, Callable[[Any], Any]] = {
        "alone": lambda fn: fn,
        "loss scale": lambda fn: fzero.scale_loss(fn, scale=64.0),
        "accumulate": lambda fn: fzero.accumulate(fn, steps=2),
        "max_norm": lambda fn: fzero.clip(fn, max_norm=2.0, max_value=float("inf")),
    }
    step = fzero.clip(fzero.clip(wraps[inside](one), max_value=3.0), max_value=9.0)
    run_on = fzero.simulate(fzero.shard(step, stage=stage), world_size=ranks)
    state = run_on.init(torch.zeros(5, dtype=torch.float64), fzero.optim.sgd(1.0))
    xs = factors[:, None] if inside != "accumulate" else factors[:, None].expand(2, 2)
    state, _ = run_on(state, xs)
    p = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    (p * row).sum().mul(factors.mean()).backward()
    torch.nn.utils.clip_grad_value_([p], 3.0)
    if inside == "max_norm":
        torch.nn.utils.clip_grad_norm_([p], 2.0)
    assert p.grad is not None
    got = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    torch.testing.assert_close(got, -p.grad.expand(ranks, 5), rtol=1e-6, atol=0)


def test_a_failed_update_leaves_gradients_that_were_to_be_bounded() -> None:
    def fails(*_: Any) -> Any:
        raise ArithmeticError("no update")

    def one(state: Any) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: 10 * p.sum(), state)()
        with pytest.raises(ArithmeticError):
            fzero.apply_gradients(state)
        assert fzero.gradients(state).tolist() == [10.0]
        return state, loss

    state = fzero.init(torch.zeros(1), (lambda p: (), fails), stage=0)
    fzero.shard(fzero.clip(fzero.scale_loss(one, scale=8.0), max_value=1.0), stage=0)(state)
    with pytest.raises(LayoutError, match="clip: max_value=0"):
        fzero.clip(one, max_value=0)
