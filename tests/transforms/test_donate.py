"""A donated state cannot be used again; until its update it is good.

That donation changes no number, and what an error leaves, is in behaviours/test_interleavings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import DonatedError
from fzero.state import NAMESPACE
from tests.covering import covered
from tests.failing import fails_in_backward
from tests.oracle import square_loss
from tests.strategies import integers, same, tensors
from tests.transforms.steps import many_backwards, sgd

PARAMS: Any = {"w": integers((3, 5), 1), "b": [integers((), 2), integers((0,), 3)]}
MESSAGE = r"this state was donated[\s\S]*Fix: go on with the state that the step returned"


def gradient_only(state: Any, xs: Tensor) -> Any:
    return fzero.grad_and_reduce(square_loss, state)(xs[0])


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "full_params": lambda s, xs: fzero.full_params(s),
    "gradients": lambda s, xs: fzero.gradients(s),
    "add_gradients": lambda s, xs: fzero.add_gradients(s, PARAMS),
    "apply_gradients": lambda s, xs: fzero.apply_gradients(s),
    "grad_and_reduce": gradient_only,
    "window": lambda s, xs: fzero.coalesce(many_backwards)(s, xs),
    "global_norm": lambda s, xs: fzero.global_norm(s),
}


@covered(use=[*USES], stage=range(4), ranks=[1, 2])
def test_a_donated_state_cannot_be_used(stage: int, ranks: int, use: str) -> None:
    xs = integers((ranks, 2), 4)
    run = fzero.simulate(fzero.shard(many_backwards, stage=stage, donate=True), world_size=ranks)
    state = run.init(PARAMS, sgd())
    new, _ = run(state, xs)
    again = fzero.simulate(USES[use], world_size=ranks)
    for step in (again, run):
        with pytest.raises(DonatedError, match=MESSAGE):
            step(state, xs)
    assert run(new, xs)[0].step.tolist() == [2] * ranks  # and the new one is good


@pytest.mark.parametrize("stage", range(4))
def test_clones_survive_and_views_of_the_old_state_do_not(stage: int) -> None:
    step = fzero.shard(many_backwards, stage=stage, donate=True)
    xs = integers((2,), 4)
    state: Any = step.init(PARAMS, sgd())
    copy: Any = optree.tree_map(torch.clone, state, namespace=NAMESPACE)
    alias = state.replace(step=state.step + 7)
    before, mine = fzero.full_params(state), optree.tree_map(torch.clone, PARAMS)
    new, _ = step(state, xs)
    for survivor in (before, PARAMS, fzero.full_params(copy)):
        same(survivor, mine)
    for used in (state, alias):
        with pytest.raises(DonatedError, match=MESSAGE):
            fzero.full_params(used)
    same(tensors(step(copy, xs)[0]), tensors(new))


def test_the_buffers_of_the_old_state_are_the_new_ones() -> None:
    """The point of it: no second copy of parameters or moments."""
    step = fzero.shard(many_backwards, stage=0, donate=True)
    state = step.init({"w": torch.ones(64)}, fzero.optim.adam(0.1))
    held = [x.data_ptr() for x in (*state.params.flats, *state.optimizer.moments[0])]
    new, _ = step(state, torch.ones(1))
    assert [x.data_ptr() for x in (*new.params.flats, *new.optimizer.moments[0])] == held


@covered(stage=range(4), ranks=[1, 2, 3], window=[False, True])
def test_a_graph_through_a_donating_step_is_that_through_a_plain_one(
    stage: int, ranks: int, window: bool
) -> None:
    """Writing in place would cut it: where the caller differentiates, nothing is donated."""
    fn = fzero.coalesce(many_backwards) if window else many_backwards
    steps = {donate: fzero.shard(fn, stage=stage, donate=donate) for donate in (False, True)}

    def by_batch(xs: Tensor, donate: bool) -> Any:
        state = steps[donate].init(PARAMS, fzero.optim.sgd(0.25, momentum=0.5))
        new, _ = steps[donate](state, xs.requires_grad_())
        full = fzero.full_params(new)
        slope = torch.autograd.grad((full["w"] ** 2).sum(), xs)[0]
        return slope, {"w": full["w"].detach()}, fzero.full_params(state)

    xs = integers((ranks, 2), 4)
    run = fzero.simulate(by_batch, world_size=ranks)
    got, want = run(xs.clone(), True), run(xs.clone(), False)
    same(got, want)
    assert want[0].all()


@covered(stage=range(4), ranks=[1, 2, 3], coalesced=[True, False])
def test_after_an_error_in_backward_a_donated_state_is_good(
    stage: int, ranks: int, coalesced: bool
) -> None:
    """Caught inside of the step, between two gradients, and caught outside."""

    def fails_late(params: Any, x: Tensor) -> Tensor:
        """Its backward raises when the gradient of `b` is there, and that of `w` is not."""
        late = fails_in_backward((params["w"] * x).sum(), ArithmeticError("in backward"))
        return late + 12 * params["b"][0]

    def step_fn(state: Any, xs: Tensor, *, catches: bool) -> Any:
        state, _ = fzero.grad_and_reduce(square_loss, state)(xs[0])
        try:
            fzero.grad_and_reduce(fails_late, state)(xs[1])
        except ArithmeticError:
            if not catches:
                raise
        state, _ = fzero.grad_and_reduce(square_loss, state)(xs[1])
        return fzero.apply_gradients(state), None

    wrapped = fzero.coalesce(step_fn) if coalesced else step_fn
    step = fzero.simulate(fzero.shard(wrapped, stage=stage, donate=True), world_size=ranks)
    plain = fzero.simulate(fzero.shard(many_backwards, stage=stage), world_size=ranks)
    xs = integers((ranks, 2), 4)
    want, _ = plain(plain.init(PARAMS, sgd()), xs)
    state = step.init(PARAMS, sgd())
    with pytest.raises(ArithmeticError, match="in backward"):
        step(state, xs, catches=False)
    new, _ = step(state, xs, catches=True)
    same(tensors(new), tensors(want))
    with pytest.raises(DonatedError, match=MESSAGE):
        step(state, xs, catches=True)


def test_a_function_that_is_called_again_with_a_donated_state_says_so() -> None:
    def twice(state: Any, xs: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(square_loss, state)(xs[0])
        again = fzero.grad_and_reduce(square_loss, state)
        new, _ = again(xs[1])
        with pytest.raises(DonatedError, match=MESSAGE):  # the sum it adds to is that of `new`
            again(xs[1])
        return fzero.apply_gradients(new), None

    xs = integers((2,), 4)
    run, plain = fzero.shard(twice, stage=0, donate=True), fzero.shard(many_backwards, stage=0)
    got, want = run(run.init(PARAMS, sgd()), xs)[0], plain(plain.init(PARAMS, sgd()), xs)[0]
    same(tensors(got), tensors(want))
