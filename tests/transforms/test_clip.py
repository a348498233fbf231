"""`clip` uses the true norm: each element once, over all shards; padding and replicas never."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.oracle import mean_gradient, square_loss, train
from tests.strategies import integers, on_rank, same, seeds, stages, tensors, trees, unique, worlds
from tests.transforms.steps import many_backwards, run, sgd, torch_sgd

WIDE = (torch.float64,)


def step_fn(state: Any, x: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(square_loss, state)(x)
    norm = fzero.global_norm(state)
    return fzero.apply_gradients(state), norm


@given(
    tree=trees(WIDE),
    ranks=worlds,
    stage=stages,
    max_norm=st.sampled_from([0.5, 20.0, 1e9]),
    coalesced=st.booleans(),
    bucket_bytes=st.integers(1, 300),
    seed=seeds,
)
def test_it_is_torchs_clip_of_the_unsharded_gradient(
    tree: Any,
    ranks: int,
    stage: int,
    max_norm: float,
    coalesced: bool,
    bucket_bytes: int,
    seed: int,
) -> None:
    xs = integers((2, ranks), seed, bound=1)

    def wrap(fn: Any) -> Any:
        return fzero.clip(fzero.coalesce(fn) if coalesced else fn, max_norm=max_norm)

    options: Any = {"stage": stage, "bucket_bytes": bucket_bytes}
    got, state, norms = run(wrap, step_fn, tree, xs, ranks, **options)
    steps = [list(x) for x in xs]
    want = train(square_loss, tree, steps, torch_sgd, max_norm)
    for rank in range(ranks):
        pairs = zip(tensors(on_rank(got, rank)), tensors(want), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
    before = train(square_loss, tree, steps[:1], torch_sgd, max_norm)
    grads = [g.reshape(-1) for g in unique(mean_gradient(square_loss, before, steps[1]))]
    norm = torch.cat(grads).norm() if grads else torch.zeros(())
    torch.testing.assert_close(norms.double(), norm.double().expand(ranks))
    assert state.setup.policy.max_norm is None


@given(stage=stages, ranks=worlds, off=st.sampled_from([None, float("inf")]), seed=seeds)
def test_without_a_bound_it_is_the_identity(
    stage: int, ranks: int, off: float | None, seed: int
) -> None:
    params, xs = {"w": integers((5,), 1)}, integers((2, ranks, 2), seed)
    got = run(
        lambda fn: fzero.clip(fn, max_norm=off), many_backwards, params, xs, ranks, stage=stage
    )
    same(got[0], run(lambda fn: fn, many_backwards, params, xs, ranks, stage=stage)[0])


@pytest.mark.parametrize("outer", [1.0, 2.0, None])
@pytest.mark.parametrize("inner", [1.0, 2.0, None])
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
    with pytest.raises(LayoutError, match=r"clip: max_norm=[\s\S]*Fix: pass None to switch it off"):
        fzero.clip(step_fn, max_norm=max_norm)


def test_the_bound_is_gone_after_an_error() -> None:
    def broken(state: Any) -> Any:
        raise KeyError

    state = fzero.init(torch.zeros(1), sgd(), stage=0)
    with pytest.raises(KeyError):
        fzero.clip(broken, max_norm=1.0)(state)
    assert state.setup.policy.max_norm is None
