"""A loss by which nothing learns raises, and None is never the gradient of a leaf that learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.descends import descends

PARAMS = {"w": torch.tensor([3.0, -2.0, 1.0, 4.0]), "b": torch.tensor([1.0, 2.0])}
READ, RULE = fzero.optim.no_optimizer(), fzero.optim.sgd(0.5)
NOTHING = r"no leaf of the state learns(.|\n)*Fix: (.|\n)*evaluate(.|\n)*sgd\(0\.0\)"


def loss_fn(p: Any, x: Tensor) -> Tensor:
    return (p["w"] ** 2).sum() * x.sum() + p["b"].prod()


def on_ranks(body: Any, ranks: int) -> Any:
    return fzero.simulate(body, world_size=ranks)(torch.arange(2.0 * ranks).view(ranks, 2) + 1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("form", ["no_optimizer", "trainable", "frozen", "wrt", "aux", "window"])
def test_a_loss_by_which_nothing_learns_raises(form: str, stage: int, ranks: int) -> None:
    def body(x: Tensor) -> None:
        options: dict[str, Any] = {"wrt": "t"} if form == "wrt" else {}
        options |= {"has_aux": True} if form == "aux" else {}
        if form == "trainable":
            state: Any = fzero.init(PARAMS, RULE, stage=stage, trainable=lambda path: False)
        elif form == "frozen":
            kept = {k: torch.nn.Parameter(v, requires_grad=False) for k, v in PARAMS.items()}
            state = fzero.init(kept, RULE, stage=stage)
        else:
            state = fzero.init(PARAMS, READ, stage=stage)
        if form == "wrt":
            state = {"t": state, "s": fzero.init(PARAMS, RULE, stage=stage)}

        def loss(p: Any, x: Tensor) -> Any:
            value = loss_fn(p["t"] if form == "wrt" else p, x)
            return (value, x) if form == "aux" else value

        def step(state: Any, x: Tensor) -> Any:
            return fzero.grad_and_reduce(loss, state, **options)(x)

        with pytest.raises(LayoutError, match=NOTHING):
            (fzero.coalesce(step) if form == "window" else step)(state, x)

    on_ranks(lambda x: body(x) or x, ranks)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_of_frozen_leaves_is_read_and_has_no_gradients(stage: int) -> None:
    def body(x: Tensor) -> Tensor:
        state = fzero.init(PARAMS, READ, stage=stage)
        assert torch.equal(fzero.evaluate(loss_fn, state)(x), loss_fn(PARAMS, x))
        slope = torch.func.grad(lambda x: fzero.grad_and_reduce(loss_fn, state)(x)[1])(x)
        assert torch.equal(slope, torch.func.grad(lambda x: loss_fn(PARAMS, x))(x))
        for read in (fzero.gradients, fzero.full_gradients, fzero.global_norm):
            with pytest.raises(LayoutError, match=NOTHING):
                read(state)
        with pytest.raises(LayoutError, match=NOTHING):
            fzero.add_gradients(state, {"w": None, "b": None}, reduced=True)
        return x

    on_ranks(body, 2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_leaf_outside_of_the_states_may_learn_from_a_model_that_is_read(stage: int) -> None:
    def body(x: Tensor) -> Tensor:
        state, prompt = fzero.init(PARAMS, READ, stage=stage), torch.ones(2, requires_grad=True)
        fzero.grad_and_reduce(lambda p, x: loss_fn(p, x * prompt), state)(x)
        assert torch.equal(prompt.grad, x * PARAMS["w"].square().sum())  # type: ignore[arg-type]
        return x

    on_ranks(body, 2)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_none_is_no_gradient_of_a_leaf_that_learns(stage: int, reduced: bool) -> None:
    def body(x: Tensor) -> Tensor:
        state = fzero.init(PARAMS, RULE, stage=stage)
        for bad, seen in ((None, "None"), (1.0, "a float")):
            with pytest.raises(LayoutError, match=f"the gradient of b is {seen}, and the leaf lea"):
                fzero.add_gradients(state, {"w": PARAMS["w"], "b": bad}, reduced=reduced)
        some = fzero.init(PARAMS, RULE, stage=stage, trainable=lambda path: path == "w")
        some = fzero.add_gradients(some, {"w": PARAMS["w"], "b": None}, reduced=reduced)
        assert fzero.full_gradients(some)["b"] is None
        return fzero.full_params(fzero.apply_gradients(some))["w"]

    assert torch.equal(on_ranks(body, 2), (PARAMS["w"] / 2).expand(2, 4))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_sam_with_a_shadow_that_is_never_updated_is_that_of_plain_torch(
    stage: int, ranks: int
) -> None:
    """Sharpness-aware minimization: the gradient is taken at p + rho g / |g|."""
    rule = fzero.optim.sgd(0.5, weight_decay=0.25)

    def step(state: Any, x: Tensor) -> Any:
        found, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        norm, g = fzero.global_norm(found), fzero.full_gradients(found)
        near = {k: v + 0.5 * g[k] / norm for k, v in fzero.full_params(state).items()}
        shadow = fzero.init(near, fzero.optim.sgd(0.0), stage=stage)
        shadow, _ = fzero.grad_and_reduce(loss_fn, shadow)(x)
        state = fzero.add_gradients(state, fzero.full_gradients(shadow), reduced=True)
        return fzero.apply_gradients(state), loss

    xs = torch.arange(2.0 * ranks).view(ranks, 2) + 1

    def body(x: Tensor) -> Any:
        sharded = fzero.shard(step, stage=stage)
        return fzero.full_params(sharded(sharded.init(PARAMS, rule), x)[0])

    got = fzero.simulate(body, world_size=ranks)(xs)
    mean = torch.func.grad(lambda p: sum(loss_fn(p, x) for x in xs) / ranks)
    g: Any = mean(PARAMS)
    norm = torch.stack([x.square().sum() for x in g.values()]).sum().sqrt()
    there = mean({k: v + 0.5 * g[k] / norm for k, v in PARAMS.items()})
    for k, v in PARAMS.items():
        torch.testing.assert_close(got[k][0], v - 0.5 * (there[k] + 0.25 * v))


def test_a_teacher_beside_a_student_stays_as_it_was() -> None:
    def pair(p: Any, x: Tensor) -> Tensor:
        return (loss_fn(p["s"], x) - loss_fn(p["t"], x)) ** 2

    states: Any = {"s": fzero.init(PARAMS, RULE, stage=2), "t": fzero.init(PARAMS, READ, stage=2)}
    new, _ = descends(pair)(states, torch.ones(2))
    assert torch.equal(fzero.full_params(new)["t"]["w"], PARAMS["w"])
