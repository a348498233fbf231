"""Law 4: a window changes no value, and makes N reductions into one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError, PhaseError
from tests.oracle import linear_loss, mean_gradient, square_loss, train
from tests.strategies import everywhere, integers, keeps, many, same, seeds, stages, trees, worlds
from tests.transforms.steps import many_backwards, run, sgd, torch_sgd

WIDE = (torch.float64,)


def summed_loss(params: Any, xs: Tensor) -> Tensor:
    """What `many_backwards` descends."""
    return torch.stack([square_loss(params, x) for x in xs.unbind()]).sum()


@given(
    tree=trees(WIDE),
    ranks=worlds,
    stage=stages,
    reshard=keeps,
    calls=st.integers(1, 4),
    bucket_bytes=st.integers(1, 300),
    donate=st.booleans(),
    seed=seeds,
)
def test_a_window_changes_no_value(
    tree: Any, ranks: int, stage: int, reshard: Any, calls: int, bucket_bytes: int, donate: bool,
    seed: int,
) -> None:  # fmt: skip
    xs = integers((2, ranks, calls), seed, bound=1)
    options: Any = {
        "stage": stage,
        "reshard_after_forward": reshard,
        "bucket_bytes": bucket_bytes,
        "donate": donate,
    }
    want = train(summed_loss, tree, [list(x) for x in xs], torch_sgd)
    for wrap in (fzero.coalesce, lambda fn: fn):
        got, state, _ = run(wrap, many_backwards, tree, xs, ranks, **options)
        everywhere(got, want, ranks)
        assert not state.window.is_open
        assert not state.gradients.held


REDUCTION = {  # (coalesced, stage) -> the op that a gradient crosses ranks with
    (False, 0): "all_reduce",
    (True, 0): "all_reduce",
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("coalesced", [True, False])
def test_n_reductions_become_one_for_each_bucket(stage: int, calls: int, coalesced: bool) -> None:
    params = {"a": [integers((3, 5), 1)], "b": [integers((4,), 2)]}  # 2 buckets, 2 units
    fn = fzero.coalesce(many_backwards) if coalesced else many_backwards
    step = fzero.simulate(fzero.shard(fn, stage=stage, bucket_bytes=1), world_size=2)
    state = step.init(params, sgd())
    with fzero.count_collectives() as log:
        step(state, integers((2, calls), 3))
    counts = log.counts()
    reductions = {op: counts[op] for op in ("all_reduce", "reduce_scatter") if op in counts}
    op = REDUCTION.get((coalesced, stage), "reduce_scatter")
    assert reductions == {op: 2 if coalesced else 2 * calls}


@given(ranks=many, calls=st.integers(1, 4), seed=seeds)
def test_what_is_kept_over_a_window_is_gathered_once(ranks: int, calls: int, seed: int) -> None:
    params = {"a": [integers((3, 5), 1)], "b": [integers((4,), 2)]}
    gathers = {}
    for reshard in ("window", False, True):
        step = fzero.shard(fzero.coalesce(many_backwards), stage=3, reshard_after_forward=reshard)
        run_ = fzero.simulate(step, world_size=ranks)
        state = run_.init(params, sgd())
        with fzero.count_collectives() as log:
            run_(state, integers((ranks, calls), seed))
        gathers[reshard] = log.counts()["all_gather"]
    assert gathers == {"window": 2, False: 2 * calls, True: 4 * calls}


@given(tree=trees(WIDE), ranks=many, stage=stages, seed=seeds)
def test_windows_before_one_update_add_up(tree: Any, ranks: int, stage: int, seed: int) -> None:
    xs = integers((ranks, 3), seed, bound=1)

    @fzero.coalesce
    def twice(state: Any, x: Tensor) -> Any:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(square_loss, state)(x)
        return state, None

    def step_fn(state: Any, xs: Tensor) -> Any:
        state, _ = twice(state, xs[0])
        state, _ = fzero.grad_and_reduce(square_loss, state)(xs[1])  # outside: reduced at once
        state, _ = twice(state, xs[2])
        learns = bool(state.setup.layout.trainable)
        assert (state.progress.backwards, state.progress.reductions) == (5, 3 if learns else 1)
        return state, fzero.gradients(state)

    def five(params: Any, xs: Tensor) -> Tensor:
        a, b, c = (square_loss(params, x) for x in xs.unbind())
        return 2 * a + b + 2 * c

    step = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=ranks)
    _, got = step(step.init(tree, sgd()), xs)
    everywhere(got, mean_gradient(five, tree, list(xs)), ranks)


@given(tree=trees(WIDE), ranks=worlds, stage=stages)
def test_a_window_without_gradients_is_the_identity(tree: Any, ranks: int, stage: int) -> None:
    step = fzero.shard(fzero.coalesce(lambda state: (state, None)), stage=stage)
    run_ = fzero.simulate(step, world_size=ranks)
    state = run_.init(tree, sgd())
    with fzero.count_collectives() as log:
        new, _ = run_(state)
    same(new, state)
    assert log.events == []


@pytest.mark.parametrize("stage", range(4))
def test_a_read_inside_a_window_shows_the_sum_and_keeps_it_pending(stage: int) -> None:
    params = {"w": integers((5,), 1)}
    xs = integers((2, 3), 2)

    @fzero.coalesce
    def step_fn(state: Any, xs: Tensor) -> Any:
        seen = []
        for x in xs.unbind():
            state, _ = fzero.grad_and_reduce(linear_loss, state)(x)
            seen.append(fzero.gradients(state)["w"])
            assert state.window.pending.held
            assert not state.gradients.held
        return state, torch.stack(seen)

    step = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=2)
    _, seen = step(step.init(params, sgd()), xs)
    each = [mean_gradient(linear_loss, params, list(x))["w"] for x in xs.unbind(1)]
    everywhere(seen, torch.stack(each).cumsum(0), 2)


@pytest.mark.parametrize("stage", range(4))
def test_an_error_inside_leaves_the_state_as_it_was(stage: int) -> None:
    params = {"w": integers((5,), 1)}

    def broken(state: Any, xs: Tensor) -> Any:
        fzero.grad_and_reduce(square_loss, state)(xs[0])
        raise KeyError("mine")

    options: Any = {"stage": stage}
    step = fzero.simulate(fzero.shard(fzero.coalesce(many_backwards), **options), world_size=2)
    wrong = fzero.simulate(fzero.shard(fzero.coalesce(broken), **options), world_size=2)
    state, xs = step.init(params, sgd()), integers((2, 3), 2)
    with pytest.raises(KeyError, match="mine"):
        wrong(state, xs)
    got = fzero.simulate(fzero.full_params, world_size=2)(step(state, xs)[0])
    everywhere(got, train(summed_loss, params, [list(xs)], torch_sgd), 2)


def test_a_window_in_a_window_is_refused() -> None:
    one = fzero.coalesce(many_backwards)
    with pytest.raises(LayoutError, match=r"coalesce[\s\S]*Fix: .*one coalesce"):
        fzero.coalesce(fzero.clip(one, max_norm=1.0))

    @fzero.coalesce
    def hidden(state: Any, xs: Tensor) -> Any:
        return one(state, xs)

    state = fzero.init({"w": torch.ones(2)}, sgd(), stage=2)
    with pytest.raises(PhaseError, match=r"already open[\s\S]*Fix: keep only the outer"):
        hidden(state, torch.ones(2))
    assert not state.window.is_open


def test_an_update_inside_a_window_goes_on_in_it() -> None:
    """Two updates in one window: each uses what came before it, and only that."""
    params = torch.zeros(3)

    @fzero.coalesce
    def step_fn(state: Any) -> Any:
        for factor in (1.0, 10.0):
            state, _ = fzero.grad_and_reduce(lambda p, f=factor: f * p.sum(), state)()
            state = fzero.apply_gradients(state)
            assert state.window.is_open
        return state, None

    state, _ = step_fn(fzero.init(params, fzero.optim.sgd(1.0), stage=2))
    same(fzero.full_params(state), torch.full((3,), -11.0))
    assert int(state.step) == 2
