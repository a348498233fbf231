"""`wrt=`, and models that are only read: values, and what crosses ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.drivers import each_rank
from tests.transforms.test_evaluate import (
    APPLY,
    DEPTH,
    OTHER,
    PARAMS,
    RULE,
    WIDTH,
    X,
    sent,
)

STATES, RULES = {"g": PARAMS, "d": OTHER}, {"g": RULE, "d": RULE}


def pair_loss(p: Any, x: Tensor) -> Tensor:
    return (APPLY(p["g"], x) * APPLY(p["d"], x)).sum()


@pytest.mark.parametrize("stage", [0, 2, 3, {"g": 3, "d": 2}, {"g": 1, "d": 3}])
@pytest.mark.parametrize("wrt", ["d", ["g"], {"g": True, "d": False}])
def test_what_is_only_read_comes_back_and_sends_no_gradient(stage: Any, wrt: Any) -> None:
    learns = "d" if wrt == "d" else "g"
    reads = "g" if learns == "d" else "d"

    def body(rank: int) -> Any:
        states = fzero.init(STATES, RULES, stage=stage)
        for _ in range(2):
            with fzero.count_collectives() as log:
                new, loss = fzero.grad_and_reduce(pair_loss, states, wrt=wrt)(X + rank)
            states = {**states, reads: new[reads]}
        both, same = fzero.grad_and_reduce(pair_loss, states)(X + rank)
        wanted = fzero.gradients(both[learns])
        assert torch.equal(loss, same)
        assert new[reads].progress == states[reads].progress and not new[reads].gradients.held
        assert all(torch.equal(a, wanted[path]) for path, a in fzero.gradients(new[learns]).items())
        counts = sent(log, rank)
        assert counts["reduce_scatter"] + counts["all_reduce"] == DEPTH * WIDTH * WIDTH
        return loss

    each_rank(body, 2)


def test_a_gan_of_half_steps_asks_for_nothing_from_its_second_update_on() -> None:
    def step_fn(states: dict[str, fzero.TrainState], x: Tensor) -> Any:
        found, of_d = fzero.grad_and_reduce(pair_loss, states, wrt="d")(x)
        states = {**found, "d": fzero.apply_gradients(found["d"])}
        found, of_g = fzero.grad_and_reduce(lambda p, x: -pair_loss(p, x), states, wrt="g")(x)
        return {**found, "g": fzero.apply_gradients(found["g"])}, torch.stack([of_d, of_g])

    def body(rank: int) -> Tensor:
        step = fzero.shard(step_fn, stage=3)
        states = step.init(STATES, RULES)
        known = []
        for _ in range(3):
            states, losses = step(states, X)
            known.append({name: one.schedule for name, one in states.items()})
        assert known[0] == known[1] == known[2]
        return losses

    each_rank(body, 2)


def test_wrt_under_a_transform_and_with_a_scale() -> None:
    def gradient(stage: int, scaled: bool) -> Any:
        states = fzero.init(STATES, RULES, stage=stage)

        def step_fn(states: Any, x: Tensor) -> Any:
            return fzero.grad_and_reduce(pair_loss, states, wrt="d")(x)

        run: Any = fzero.scale_loss(step_fn, 8.0) if scaled else step_fn
        new, loss = run(states, X)
        return fzero.gradients(new["d"])["0.weight"], loss

    def by_func(x: Tensor) -> Tensor:
        states = fzero.init(STATES, RULES, stage=2)
        return fzero.grad_and_reduce(pair_loss, states, wrt="d")(x)[1]

    plain = gradient(2, False)
    for found in (gradient(2, True), gradient(3, False)):
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    slope = torch.func.grad(by_func)(X)
    x = X.clone().requires_grad_()
    assert torch.equal(slope, torch.autograd.grad(pair_loss(STATES, x), x)[0])


@pytest.mark.parametrize("wrt", ["x", [], ["g", "x"], {"g": False, "d": False}, {"g": 1, "d": 0}])
def test_wrt_that_names_no_state_is_refused(wrt: Any) -> None:
    states = fzero.init(STATES, RULES, stage=0)
    with pytest.raises(LayoutError, match="wrt="):
        fzero.grad_and_reduce(pair_loss, states, wrt=wrt)
    with pytest.raises(LayoutError, match="one state"):
        fzero.grad_and_reduce(pair_loss, states["g"], wrt="g")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_frozen_teacher_has_no_gradients_and_is_not_stepped(stage: int) -> None:
    def body(rank: int) -> Any:
        frozen = fzero.optim.no_optimizer()
        states = fzero.init(STATES, {"g": RULE, "d": frozen}, stage=stage)
        with fzero.count_collectives() as log:
            new, loss = fzero.grad_and_reduce(pair_loss, states)(X)
        counts = sent(log, rank)
        assert counts["reduce_scatter"] + counts["all_reduce"] == DEPTH * WIDTH * WIDTH
        new = fzero.apply_gradients(new)
        after = fzero.full_params(new)
        assert all(torch.equal(after["d"][path], OTHER[path]) for path in OTHER)
        assert not all(torch.equal(after["g"][path], PARAMS[path]) for path in PARAMS)
        return loss

    each_rank(body, 2)
