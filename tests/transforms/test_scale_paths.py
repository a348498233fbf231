"""The loss scale where steps are differentiated, mapped or traced, and under several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.errors import DonatedError
from fzero.state import DynamicScale
from tests.covering import covered
from tests.descends import descends
from tests.strategies import integers, same, seeds, stages, worlds

INF = float("inf")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: fzero.optim.sgd(0.25, momentum=0.5),
    "adamw": lambda: fzero.optim.adamw(0.25),
}


def scaled(fn: Any, power: int | None) -> Any:
    return fn if power is None else fzero.scale_loss(fn, 2.0**power)


def cubic(params: Any, x: Tensor) -> Tensor:
    return (x * params["w"] ** 3).sum() + params["s"] * x.sum()


cubic_step = descends(cubic)


def params_of(seed: int) -> Any:
    return {"w": integers((3,), seed), "s": integers((), seed + 1)}


def after(c: Tensor, stage: int, optimizer: str, power: int | None, seed: int) -> Tensor:
    """What a loss of the parameters after two steps is, as a function of a weight of the first."""

    step_fn = descends(lambda p, x: c * cubic(p, x))
    state = fzero.init(params_of(seed), OPTIMIZERS[optimizer](), stage=stage)
    losses = []
    for number in range(2):
        state, loss = scaled(step_fn, power)(state, integers((3,), seed + number))
        losses.append(loss)
    whole = fzero.full_params(state)
    return (whole["w"] ** 2).sum() + whole["s"] + torch.stack(losses).sum()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=8)
@given(stage=stages, ranks=worlds, seed=seeds)
def test_derivatives_through_scaled_updates_are_those_without(
    optimizer: str, stage: int, ranks: int, seed: int
) -> None:
    def body(c: Tensor, power: int | None) -> Any:
        def fn(c: Tensor) -> Tensor:
            return after(c, stage, optimizer, power, seed)

        return torch.func.grad_and_value(fn)(c), torch.func.jvp(fn, (c,), (torch.ones_like(c),))

    cs = torch.full((ranks,), 0.5, dtype=torch.float64)
    run = fzero.simulate(body, world_size=ranks)
    same(run(cs, 30), run(cs, None))


@settings(max_examples=8)
@given(stage=stages, seed=seeds)
def test_second_order_and_per_sample_gradients_are_those_without(stage: int, seed: int) -> None:
    first = fzero.init(params_of(seed), OPTIMIZERS["sgd"](), stage=stage)

    def found(power: int | None) -> Any:
        def sample(x: Tensor) -> Any:
            def step(state: Any) -> Any:
                state, loss = fzero.grad_and_reduce(cubic, state)(x)
                return state, (fzero.gradients(state), fzero.global_norm(state), loss)

            return scaled(step, power)(first)[1]

        def slope(x: Tensor) -> Tensor:
            return sample(x)[0]["w"].sum()

        xs = integers((4, 3), seed)
        return torch.func.vmap(sample)(xs), torch.func.hessian(slope)(xs[0]), sample(xs[0])

    same(found(30), found(None))


@covered(optimizer=[*OPTIMIZERS], stage=[0, 2, 3])
def test_an_overflow_of_the_scale_under_a_transform_changes_nothing_and_has_no_derivative(
    optimizer: str, stage: int
) -> None:
    """The first scale is too large: the loss is finite, its gradient times the scale is not."""

    def trained(xs: Tensor) -> Any:
        step, state = fzero.scale_loss(cubic_step, policy), first
        for x in xs.unbind():
            state, _ = step(state, x)
        assert state.scale is not None
        whole = fzero.full_params(state)
        return whole["w"].sum() + whole["s"], (whole, state.scale.scale, state.step)

    policy = DynamicScale(init_scale=2.0**127, backoff_factor=2.0**-60)
    params = {"w": torch.tensor([1.0, 2.0, -1.0]), "s": torch.ones(())}
    first = fzero.init(params, OPTIMIZERS[optimizer](), stage=stage)
    xs = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 1.0], [3.0, 1.0, 1.0]])
    slope, (found, scale, count) = torch.func.grad(trained, has_aux=True)(xs)
    assert (scale.item(), int(count)) == (2.0**67, 2)
    policy = DynamicScale(init_scale=2.0**67)
    wanted, (params, _, _) = torch.func.grad(trained, has_aux=True)(xs[1:])
    same(found, params)
    same(slope, torch.cat([torch.zeros(1, 3), wanted]))


@covered(optimizer=[*OPTIMIZERS], stage=[0, 2, 3])
def test_an_overflow_of_the_loss_under_a_transform_changes_nothing(
    optimizer: str, stage: int
) -> None:
    def trained(xs: Tensor) -> Any:
        step, state = fzero.scale_loss(cubic_step, "dynamic"), first
        for x in xs.unbind():
            state, _ = step(state, x)
        return fzero.full_params(state)

    first = fzero.init(params_of(3), OPTIMIZERS[optimizer](), stage=stage)
    good, bad = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([1.0, INF, 4.0]).double()
    batches = torch.stack([torch.stack([good, bad, good]), torch.stack([bad, good, good])])
    wanted = trained(torch.stack([good, good]))
    for found in (torch.func.vmap(trained)(batches), torch.func.vmap(trained)(batches.flip(0))):
        for i in (0, 1):
            same({name: x[i] for name, x in found.items()}, wanted)


def test_a_traced_step_skips_as_the_step_does() -> None:
    first = fzero.init(params_of(3), OPTIMIZERS["adamw"](), stage=0)
    step = fzero.scale_loss(cubic_step, "dynamic")

    def run(x: Tensor) -> Any:
        state, _ = step(first, x)
        assert state.scale is not None
        return [*state.params.flats, state.scale.scale, state.step]

    good, bad = torch.ones(3).double(), torch.full((3,), INF).double()
    graph = make_fx(run)(good)
    for x in (good, bad):
        for got, want in zip(graph(x), run(x), strict=True):
            torch.testing.assert_close(got, want)
    assert graph(bad)[-1].item() == 0


@covered(general=[False, True], others=[(None, 4.0), (8.0, None), ("dynamic", 8.0), (2.0, 2.0)])
def test_models_under_one_loss_have_each_their_own_scale(others: Any, general: bool) -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        return x * (params["a"] * params["b"]).sum()

    states = {
        "a": fzero.init(torch.tensor([3.0]), fzero.optim.sgd(1.0), stage=0),
        "b": fzero.init(torch.tensor([5.0]), fzero.optim.sgd(1.0), stage=2),
    }

    def with_scale(name: str, scale: Any) -> Any:
        return fzero.scale_loss(lambda s: (s, None), scale)(states[name])[0]

    states = {name: with_scale(name, s) for name, s in zip("ab", others, strict=True)}
    x = torch.tensor(2.0, requires_grad=general)
    new, value = fzero.grad_and_reduce(loss, states)(x)
    assert value.item() == 30.0
    found = fzero.gradients(new)
    assert found["a"].item() == 10.0 and found["b"].item() == 6.0
    full = fzero.full_params(fzero.apply_gradients(new))
    assert full["a"].item() == -7.0 and full["b"].item() == -1.0


def test_each_state_of_a_pytree_is_skipped_by_its_own_gradients() -> None:
    def step_fn(states: Any, x: Tensor) -> Any:
        a, _ = fzero.grad_and_reduce(lambda p: (p * x).sum(), states["a"])()
        b, _ = fzero.grad_and_reduce(lambda p: p.sum(), states["b"])()
        return fzero.apply_gradients({"a": a, "b": b}), None

    step = fzero.shard(fzero.scale_loss(step_fn, "dynamic"), stage={"a": 0, "b": 1})
    states = step.init({"a": torch.ones(1), "b": torch.ones(1)}, fzero.optim.sgd(1.0))
    states, _ = step(states, torch.tensor([INF]))
    same(fzero.full_params(states), {"a": torch.ones(1), "b": torch.zeros(1)})
    assert (int(states["a"].step), int(states["b"].step)) == (0, 1)


@covered(optimizer=[fzero.optim.adamw(0.1), fzero.optim.lion(0.1)], stage=[0, 1, 3])
def test_a_skipped_donating_step_uses_up_its_state_all_the_same(optimizer: Any, stage: int) -> None:
    step_fn = descends(lambda p, x: (p * x).sum())
    step = fzero.shard(fzero.scale_loss(step_fn, DynamicScale()), stage=stage, donate=True)
    old = step.init(torch.ones(3), optimizer)
    new, _ = step(old, torch.tensor(INF))
    same(fzero.full_params(new), torch.ones(3))
    with pytest.raises(DonatedError):
        fzero.full_params(old)


def test_an_update_that_raises_leaves_scaled_gradients_as_they_were() -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        if grads[0].numel() == 3 and grads[0].unique().tolist() == [4.0]:
            raise KeyError("on purpose")
        return [-g for g in grads], state

    def broken(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: 4 * p.sum(), state)()
        held.append(state)
        return fzero.apply_gradients(state), None

    held: list[Any] = []
    step = fzero.shard(fzero.scale_loss(broken, 8.0), stage=0, donate=True)
    with pytest.raises(KeyError):
        step(step.init(torch.ones(3), (lambda params: (), update)))
    same(fzero.gradients(held[0]), torch.full((3,), 4.0))
    same(fzero.full_params(held[0]), torch.ones(3))
