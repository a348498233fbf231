"""A train state: what init makes of parameters, what can be read, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError, PhaseError
from fzero.state import Phase
from tests.oracle import as_held, linear_loss, mean_gradient
from tests.strategies import (
    LEARNING,
    everywhere,
    integers,
    keeps,
    same,
    seeds,
    stages,
    trees,
    worlds,
)

OPT = fzero.optim.sgd(0.5)


@given(tree=trees(), ranks=worlds, stage=stages, reshard=keeps, bucket_bytes=st.integers(1, 200))
def test_full_params_of_init_are_the_parameters(
    tree: Any, ranks: int, stage: int, reshard: Any, bucket_bytes: int
) -> None:
    def body() -> Any:
        state = fzero.init(
            tree, OPT, stage=stage, reshard_after_forward=reshard, bucket_bytes=bucket_bytes
        )
        assert state.stage == stage
        assert state.phase is Phase.IDLE
        return fzero.full_params(state)

    everywhere(fzero.simulate(body, world_size=ranks)(), tree, ranks)


@given(tree=trees(LEARNING), ranks=worlds, stage=stages, reshard=keeps, seed=seeds)
def test_gradients_are_the_mean_over_ranks(
    tree: Any, ranks: int, stage: int, reshard: Any, seed: int
) -> None:
    xs = integers((ranks,), seed, bound=1)

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(linear_loss, state)(x)
        assert state.phase is Phase.READY
        return state, (loss, fzero.gradients(state))

    run = fzero.simulate(
        fzero.shard(step_fn, stage=stage, reshard_after_forward=reshard), world_size=ranks
    )
    if not fzero.init(tree, OPT, stage=0).setup.layout.trainable:
        with pytest.raises(LayoutError, match="no leaf of the state learns"):
            run(run.init(tree, OPT), xs)
        return
    _, (losses, grads) = run(run.init(tree, OPT), xs)
    everywhere(grads, as_held(mean_gradient(linear_loss, tree, list(xs))), ranks)
    same(losses, torch.stack([linear_loss(tree, x).detach() for x in xs]))


@given(stage=stages, ranks=worlds, seed=seeds)
def test_reading_a_state_changes_nothing(stage: int, ranks: int, seed: int) -> None:
    params = {"w": integers((5,), seed), "b": integers((), seed + 1)}

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(linear_loss, state)(x)
        first = fzero.gradients(state), fzero.full_params(state), fzero.global_norm(state)
        for part in first[:2]:
            part["w"].fill_(99.0)  # they are copies
        again = fzero.gradients(state), fzero.full_params(state), fzero.global_norm(state)
        return state, again

    xs = integers((ranks,), seed)
    run = fzero.simulate(fzero.shard(fzero.coalesce(step_fn), stage=stage), world_size=ranks)
    _, (grads, held, norm) = run(run.init(params, OPT), xs)
    want = mean_gradient(linear_loss, params, list(xs))
    everywhere(grads, want, ranks)
    everywhere(held, params, ranks)
    root = torch.cat([g.reshape(-1) for g in want.values()]).norm()
    torch.testing.assert_close(norm, root.expand(ranks))


def test_a_state_without_gradients_has_none_to_show_or_to_apply() -> None:
    state = fzero.init({"w": torch.ones(2)}, OPT, stage=0)
    new, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
    done = fzero.apply_gradients(new)
    for empty in (state, done):
        with pytest.raises(PhaseError, match=r"holds no gradients[\s\S]*Fix: write `state, loss"):
            fzero.gradients(empty)
        with pytest.raises(PhaseError, match=r"holds no gradients[\s\S]*Fix: write `state, loss"):
            fzero.apply_gradients(empty)
    assert fzero.full_params(done)["w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": -1}, r"stage=-1.*\n.*\nFix: give 0 \(replicas\)"),
        ({"stage": 4}, "Fix: give 0"),
        ({"stage": True}, "Fix: give 0"),
        ({"stage": "2"}, "Fix: give 0"),
        ({"reshard_after_forward": "forever"}, r"Fix: give True .*, False .* or \"window\""),
        ({"reshard_after_forward": 1}, r"Fix: give True .*, False .* or \"window\""),
        ({"bucket_bytes": 0}, "Fix: give bytes"),
        ({"bucket_bytes": 1.5}, "Fix: give bytes"),
        ({"mesh": [0, 1]}, "Fix: pass a DeviceMesh"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    all_options: dict[str, Any] = {"stage": 2} | options
    with pytest.raises((LayoutError, fzero.AxisError), match=message):
        fzero.init({"w": torch.ones(2)}, OPT, **all_options)
    if "stage" in options:
        with pytest.raises(LayoutError, match=message):
            fzero.shard(lambda state: state, **options)


BAD_LOSSES = [
    (lambda p: p["w"], r"shape \(2,\)[\s\S]*Fix: return loss.mean\(\)"),
    (lambda p: p["w"].sum().item(), r"is a float[\s\S]*Fix: return a scalar tensor"),
    (lambda p: p["w"].sum().long(), r"dtype torch.int64[\s\S]*Fix: return a floating"),
    (lambda p: (p["w"].sum(), 1), r"a tuple of 2[\s\S]*Fix: pass has_aux=True"),
    (lambda p: (p["w"].sum(), p["w"].prod()), r"of several losses return the sum, or call grad"),
]


@pytest.mark.parametrize(("loss", "message"), BAD_LOSSES)
@pytest.mark.parametrize("inside", [False, True], ids=["plainly", "in torch.func.grad"])
def test_a_loss_that_is_not_one_number_is_refused(loss: Any, message: str, inside: bool) -> None:
    state = fzero.init({"w": torch.ones(2)}, OPT, stage=0)

    def run(_: Tensor) -> Tensor:
        new, _ = fzero.grad_and_reduce(loss, state)()
        return fzero.gradients(new)["w"].sum()

    with pytest.raises(LayoutError, match=message):
        torch.func.grad(run)(torch.ones(())) if inside else run(torch.ones(()))


def test_has_aux_wants_a_pair() -> None:
    state = fzero.init({"w": torch.ones(2)}, OPT, stage=0)
    with pytest.raises(LayoutError, match=r"has_aux=True[\s\S]*Fix: return \(loss, aux\)"):
        fzero.grad_and_reduce(lambda p: p["w"].sum(), state, has_aux=True)()


@pytest.mark.parametrize("wrong", [None, {"w": torch.ones(2)}, "an engine"])
@pytest.mark.parametrize(
    "call",
    [
        fzero.full_params,
        fzero.global_norm,
        fzero.state_bytes,
        fzero.gradients,
        fzero.apply_gradients,
        lambda state: fzero.grad_and_reduce(linear_loss, state),
        lambda state: fzero.shard(lambda s: (s, None), stage=0)(state),
        lambda state: fzero.coalesce(lambda s: (s, None))(state),
    ],
)
def test_what_is_no_state_is_refused(call: Any, wrong: Any) -> None:
    engine = Engine(nn.Linear(2, 1), functools.partial(torch.optim.SGD, lr=1.0), stage=0)
    with pytest.raises(LayoutError, match=r"TrainState[\s\S]*Fix: "):
        call(engine if wrong == "an engine" else wrong)
    engine.close()
