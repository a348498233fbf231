"""What a type checker sees of a transformed step: the arguments and the result of the step itself.

`make lint` checks this file: each `assert_type` is a claim about types, and each ignored error
is one that the checker must report, else the ignore itself is an error.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import fzero
from fzero.transforms.pipeline import Step


def step_fn(state: fzero.TrainState, x: Tensor, *, scale: float) -> tuple[fzero.TrainState, Tensor]:
    state, loss = fzero.grad_and_reduce(lambda p: scale * (p * x).mean(), state)()
    return fzero.apply_gradients(state), loss


def loss_fn(params: Tensor, x: Tensor, *, scale: float) -> tuple[Tensor, int]:
    return scale * (params * x).mean(), len(x)


@fzero.shard(stage=2, donate=True)
@fzero.coalesce
def sharded(state: fzero.TrainState, x: Tensor) -> tuple[fzero.TrainState, int]:
    return state, len(x)


@fzero.remat
def layer(x: Tensor, power: int) -> Tensor:
    return x**power


@fzero.accumulate(steps=2)
@fzero.clip(max_norm=1.0)
@fzero.coalesce()
def decorated(state: fzero.TrainState, x: Tensor) -> tuple[fzero.TrainState, int]:
    return state, len(x)


def new_state() -> fzero.TrainState:
    return fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=0)


def test_transforms_keep_the_types_of_what_they_are_given() -> None:
    state, x = new_state(), torch.ones(4, 2)
    pipeline = fzero.clip(fzero.accumulate(fzero.coalesce(step_fn), steps=2), max_norm=1.0)
    new, loss = pipeline(state, x, scale=2.0)
    assert_type(new, fzero.TrainState)
    assert_type(loss, Tensor)
    assert_type(decorated(state, x), tuple[fzero.TrainState, int])
    assert isinstance(pipeline, Step) and isinstance(decorated, Step)
    step = fzero.shard(fzero.coalesce(step_fn), stage=2, bucket_bytes=64)
    new, loss = step(step.init(torch.ones(2), fzero.optim.sgd(1.0)), torch.ones(2), scale=2.0)
    assert_type(new, fzero.TrainState)
    assert_type(loss, Tensor)
    found = sharded(sharded.init(torch.ones(2), fzero.optim.sgd(1.0)), torch.ones(3))
    assert_type(found, tuple[fzero.TrainState, int])
    assert (new.step.item(), loss.item(), found[1]) == (1, 2.0, 3)
    assert assert_type(layer(torch.tensor(3.0), 2), Tensor) == 9.0


def test_a_gradient_keeps_the_types_of_the_loss_and_of_the_states() -> None:
    states = {"a": new_state(), "b": new_state()}
    one = fzero.grad_and_reduce(loss_fn, new_state(), has_aux=True)(torch.ones(2), scale=2.0)
    assert_type(one, tuple[fzero.TrainState, tuple[Tensor, int]])
    several, (value, _) = fzero.grad_and_reduce(
        lambda params, x: loss_fn(params["a"] * params["b"], x, scale=2.0), states, has_aux=True
    )(torch.ones(2))
    assert_type(several, dict[str, fzero.TrainState])
    assert_type(fzero.apply_gradients(several), dict[str, fzero.TrainState])
    assert (one[1], assert_type(value, Tensor)) == ((2.0, 2), 2.0)
    rule, w = fzero.optim.sgd(1.0), torch.ones(2)
    assert_type(fzero.init(w, rule, stage=3), fzero.TrainState[Tensor])
    assert_type(fzero.init(w, (rule.init, rule.update), stage=0), fzero.TrainState[Tensor])
    trees = fzero.init([w, w], [rule, fzero.optim.adamw(1.0)], stage=[0, 3])
    assert_type(trees, Any)  # where stage and optimizer are trees
    assert [state.stage for state in trees] == [0, 3]


Params = dict[str, Tensor]
StateOfParams = fzero.TrainState[Params]


def typed_step(state: StateOfParams, x: Tensor) -> tuple[StateOfParams, Tensor]:
    state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
    return fzero.apply_gradients(state), loss


def step_of_two(
    states: dict[str, StateOfParams], x: Tensor
) -> tuple[dict[str, StateOfParams], Tensor]:
    return states, x


def test_a_state_knows_the_type_of_its_parameters() -> None:
    params, x = {"w": torch.ones(2)}, torch.ones(2)
    state = assert_type(fzero.init(params, fzero.optim.sgd(1.0), stage=0), StateOfParams)

    def loss(params: Params, x: Tensor) -> Tensor:
        return (params["w"] * x).sum()

    def by_name(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).sum()

    new, value = fzero.grad_and_reduce(loss, state)(x)
    assert_type(new, StateOfParams)
    assert_type(value, Tensor)
    assert_type(fzero.grad_and_reduce(by_name, state)(x), tuple[StateOfParams, Tensor])
    fzero.grad_and_reduce(lambda p: assert_type(p, Params)["w"].sum(), state)()
    assert_type(fzero.full_params(new), Params)
    assert_type(fzero.gradients(new), Params)
    assert_type(fzero.full_gradients(new), Params)
    assert_type(fzero.apply_gradients(new), StateOfParams)
    assert_type(fzero.map_params(torch.neg, new), StateOfParams)
    assert_type(fzero.evaluate(loss, new)(x), Tensor)
    assert_type(fzero.evaluate(lambda p: assert_type(p, Params)["w"], new)(), Tensor)
    assert_type(new.replace(step=new.step + 1), StateOfParams)
    _, of_module = fzero.functionalize(torch.nn.Linear(2, 1))
    whole = fzero.full_params(fzero.init(of_module, fzero.optim.sgd(1.0), stage=3))
    assert sorted(assert_type(whole, Params)) == ["bias", "weight"]
    assert fzero.full_gradients(new)["w"].tolist() == [1.0, 1.0]


def test_the_init_of_a_step_makes_the_state_that_it_takes() -> None:
    params, rule, x = {"w": torch.ones(2)}, fzero.optim.sgd(1.0), torch.ones(2)
    step = fzero.shard(fzero.clip(typed_step, max_norm=None), stage=2)
    state, _ = step(assert_type(step.init(params, rule), StateOfParams), x)
    assert fzero.full_params(state)["w"].tolist() == [0.0, 0.0]
    several = fzero.shard(step_of_two, stage=0)
    states = several.init({"a": params, "b": params}, {"a": rule, "b": rule})
    assert_type(states, dict[str, StateOfParams])
    assert_type(fzero.full_params(states), Any)
    untyped = fzero.shard(lambda state: (state, None), stage=0)
    assert_type(untyped.init(params, rule), Any)


def test_a_state_without_a_type_of_parameters_is_one_of_any() -> None:
    state: fzero.TrainState = new_state()
    assert_type(fzero.full_params(state), Any)
    assert fzero.TrainState[Params](
        params=state.params,
        gradients=state.gradients,
        optimizer=state.optimizer,
        window=state.window,
        step=state.step,
        progress=state.progress,
        setup=state.setup,
    ).step.equal(state.step)


def test_simulate_keeps_the_type_of_any_function() -> None:
    def centered(x: Tensor) -> Tensor:
        return x - fzero.pmean(x)

    for step in (fzero.simulate(centered, world_size=3), fzero.simulate(world_size=3)(centered)):
        found = assert_type(step(torch.tensor([1.0, 2.0, 6.0])), Tensor)
        assert found.tolist() == [-2.0, -1.0, 3.0]


def wrong_calls(state: fzero.TrainState, x: Tensor) -> None:
    """Never run: what the checker must refuse."""
    step = fzero.clip(fzero.coalesce(step_fn), max_norm=None)
    step(state, x)  # pyright: ignore[reportCallIssue]
    step(state, "x", scale=1.0)  # pyright: ignore[reportArgumentType]
    step(state, x, scale=1.0, size=2)  # pyright: ignore[reportCallIssue]
    decorated(x, state)  # pyright: ignore[reportArgumentType]
    fzero.clip(step_fn, max_nrm=1.0)  # pyright: ignore[reportCallIssue]
    fzero.accumulate(step_fn, steps="2")  # pyright: ignore[reportArgumentType]
    fzero.coalesce(state)  # pyright: ignore[reportArgumentType]
    sharded(state)  # pyright: ignore[reportCallIssue]
    fzero.shard(step_fn, stage="2")  # pyright: ignore[reportArgumentType]
    fzero.init(x, fzero.optim.sgd(1.0), stage="2")  # pyright: ignore[reportCallIssue, reportArgumentType]
    fzero.shard(step_fn, 2)  # pyright: ignore[reportCallIssue]
    fzero.shard(stage=2, bucket_bytes="4 MB")  # pyright: ignore[reportArgumentType]
    fzero.shard(stage=2, bucket_bytes=4)(step_fn)(state, x)  # pyright: ignore[reportCallIssue]
    layer(x)  # pyright: ignore[reportCallIssue]
    fzero.grad_and_reduce(loss_fn, state)(x)  # pyright: ignore[reportCallIssue]
    of_dict = fzero.init({"w": x}, fzero.optim.sgd(1.0), stage=0)
    fzero.full_params(of_dict)[0]  # pyright: ignore[reportArgumentType]
    fzero.gradients(of_dict).sum()  # a dict has no sum
    fzero.grad_and_reduce(lambda p: p[0].sum(), of_dict)  # pyright: ignore[reportArgumentType]
