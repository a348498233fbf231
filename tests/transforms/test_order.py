"""The order of transforms: at a point they act from the inside out, and nowhere else it matters."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from fzero.state.points import Builtin
from fzero.transforms import recipe
from fzero.transforms.clip import clipping
from fzero.transforms.recipe import BUILTINS

P = {"a": torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64), "b": torch.ones(2, 2).double()}


def shifted(by: float) -> Any:
    """Return a transform that adds a number to each element of the mean gradient."""
    return fzero.transform(
        name="up" if by > 0 else "down",
        reduced=lambda slots, grads, ctx: (slots, {k: x + by for k, x in grads.items()}),
    )


def follows(rate: float) -> Any:
    """Return a mean of the parameters, which changes nothing."""

    def init(params: Any, ctx: Any) -> Any:
        return {"mean": {k: x.clone() for k, x in params.items()}}

    def updated(slots: Any, params: Any, ctx: Any) -> Any:
        mean = {k: x.lerp(params[k], rate) for k, x in slots["mean"].items()}
        return {"mean": mean}, params

    return fzero.transform(name="follows", init=init, updated=updated)


def step_fn(state: Any, x: Tensor) -> Any:
    def loss(p: Any) -> Tensor:
        return (p["a"] * x).sum() + p["b"].square().sum() * x.sum()

    state, value = fzero.grad_and_reduce(loss, state)()
    return fzero.apply_gradients(state), value


Op = tuple[str, float]
OPS = st.one_of(
    st.tuples(st.just("shift"), st.sampled_from([0.25, -1.5])),
    st.tuples(st.just("max_norm"), st.sampled_from([0.5, 2.0])),
    st.tuples(st.just("max_value"), st.sampled_from([0.5, 1.0])),
    st.tuples(st.just("scale_loss"), st.sampled_from([0.25, 1024.0])),
    st.tuples(st.just("follows"), st.just(0.5)),
)
ONCE = ("scale_loss", "follows")


def composed(ops: list[Op]) -> Callable[..., Any]:
    """Return the step with these transforms around it, the first one innermost."""
    step: Any = step_fn
    for name, by in ops:
        if name == "shift":
            step = shifted(by)(step)
        elif name == "follows":
            step = follows(by)(step)
        elif name == "scale_loss":
            step = fzero.scale_loss(step, by)
        else:
            step = fzero.clip(step, **{name: by})
    return step


def expected(ops: list[Op], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient that the rule gets: one transform after the other, from the inside."""
    acting = [op for op in ops if op[0] not in ONCE]
    while acting:
        name, by = acting.pop(0)
        if name == "shift":
            grads = {k: x + by for k, x in grads.items()}
            continue
        bounds = {name: by}
        while acting and acting[0][0] != "shift":  # clips side by side: the smaller bounds
            name, by = acting.pop(0)
            bounds[name] = min(by, bounds.get(name, by))
        if (most := bounds.get("max_value")) is not None:
            grads = {k: x.clamp(-most, most) for k, x in grads.items()}
        if (most := bounds.get("max_norm")) is not None:
            norm = torch.stack([x.square().sum() for x in grads.values()]).sum().sqrt()
            grads = {k: x * min(1.0, most / (float(norm) + 1e-6)) for k, x in grads.items()}
    return grads


def apart(ops: list[Op]) -> list[Op]:
    """Return the transforms without a second one of a name that may stand there once."""
    found: list[Op] = []
    for op in ops:
        key = op if op[0] == "shift" else op[0]
        taken = [x if x[0] == "shift" else x[0] for x in found if x[0] in (*ONCE, "shift")]
        if key not in taken:
            found.append(op)
    return found


@settings(max_examples=25, deadline=None)
@given(
    ops=st.lists(OPS, max_size=5).map(apart),
    world=st.sampled_from([1, 2]),
    stage=st.integers(0, 3),
    donate=st.booleans(),
)
def test_transforms_act_on_the_mean_gradient_from_the_inside_out(
    ops: list[Op], world: int, stage: int, donate: bool
) -> None:
    step = fzero.simulate(fzero.shard(composed(ops), stage=stage, donate=donate), world_size=world)
    state = step.init(P, fzero.optim.sgd(1.0))
    xs = torch.arange(1.0, world + 1, dtype=torch.float64)[:, None].expand(world, 3) / 2
    state, _ = step(state, xs)
    x = xs.mean(0)
    mean = expected(ops, {"a": x, "b": 2 * P["b"] * x.sum()})
    new = fzero.simulate(fzero.full_params, world_size=world)(state)
    for k, g in mean.items():
        torch.testing.assert_close(new[k][0], P[k] - g, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["update", "backward_pass", "autograd"])
def test_who_runs_a_step_knows_points_and_no_feature(name: str) -> None:
    path = Path(fzero.__file__).parent / "transforms" / f"{name}.py"
    imported = {
        node.module.rpartition(".")[2]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    features = {one.__module__.rpartition(".")[2] for one in functions_of_builtins()}
    assert len(features) > 5
    assert not imported & features


def functions_of_builtins() -> list[Any]:
    """Return the functions of fzero's own features, and the one that clips."""
    clip = clipping(max_norm=1.0)
    every = [getattr(one, field.name) for one in (*BUILTINS, clip) for field in fields(Builtin)]
    return [x for x in every if isinstance(x, FunctionType) and x.__module__ != recipe.__name__]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_scale_may_stand_anywhere_and_no_bit_changes(stage: int) -> None:
    inside = [("shift", 0.25), ("max_norm", 0.5), ("follows", 0.5)]
    found = []
    for place in range(4):
        ops = [*inside[:place], ("scale_loss", 1024.0), *inside[place:]]
        step = fzero.shard(composed(ops), stage=stage)
        state = step.init(P, fzero.optim.sgd(1.0, momentum=0.9))
        for _ in range(2):
            state, _ = step(state, torch.ones(3).double())
        found.append([*state.params.flats, *fzero.slots(state, "follows")["mean"].values()])
    for one in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], one, strict=True))


def test_an_overflow_leaves_slots_of_users_as_they_were() -> None:
    step = fzero.shard(fzero.scale_loss(composed([("follows", 0.5)]), "dynamic"), stage=2)
    state = step.init(P, fzero.optim.sgd(1.0))
    state, _ = step(state, torch.ones(3).double())
    before = fzero.slots(state, "follows")["mean"]["a"]
    state, _ = step(state, torch.full((3,), float("inf")).double())
    assert state.scale is not None and state.scale.overflowed and int(state.step) == 1
    assert torch.equal(fzero.slots(state, "follows")["mean"]["a"], before)
    assert fzero.slots(state, "scale_loss")["scale"]["scale"] == 2.0**15


def test_weights_that_are_all_0_leave_everything_as_it_was_the_scale_too() -> None:
    def weighted(state: Any, weight: float) -> Any:
        call = fzero.grad_and_reduce(lambda p: p["a"].sum(), state, weight=weight)
        state, loss = call()
        return fzero.apply_gradients(state), loss

    scale = fzero.DynamicScale(init_scale=8.0, growth_interval=1)
    step = fzero.shard(fzero.scale_loss(follows(0.5)(weighted), scale), stage=2)
    state = step.init(P, fzero.optim.sgd(1.0))
    with pytest.warns(UserWarning, match="weights of all calls"):
        after, _ = step(state, 0.0)
    assert after.scale is not None and after.scale.scale == 8.0 and int(after.step) == 0
    assert {*after.slots} == {*state.slots}
    after, _ = step(state, 2.0)
    assert after.scale is not None and after.scale.scale == 16.0 and int(after.step) == 1


@pytest.mark.parametrize("outside", [False, True])
def test_what_a_transform_excludes_is_refused_on_either_side(outside: bool) -> None:
    alone = fzero.transform(
        name="alone", reduced=lambda slots, grads, ctx: (slots, grads), excludes=("clip",)
    )
    with pytest.raises(LayoutError, match="alone"):
        if outside:
            step = fzero.shard(fzero.clip(alone(step_fn), max_norm=1.0), stage=0)
            step(step.init(P, fzero.optim.sgd(1.0)), torch.ones(3).double())
        else:
            alone(fzero.clip(step_fn, max_norm=1.0))


def test_an_option_that_a_transform_excludes_is_refused() -> None:
    alone = fzero.transform(
        name="alone",
        reduced=lambda slots, grads, ctx: (slots, grads),
        excludes=("clip", "offload", "scale_loss"),
    )
    module = torch.nn.Linear(2, 2)
    for options in (
        {"max_norm": 1.0},
        {"loss_scale": 8.0},
        {"offload": fzero.Offload(optimizer="cpu")},
    ):
        with pytest.raises(LayoutError, match="alone beside"):
            fzero.adapter.Engine(
                module,
                torch.optim.SGD,
                stage=0,
                transforms=[alone],
                **options,  # type: ignore[arg-type]
            )


@pytest.mark.parametrize("bound", [{"max_value": 0.5}, {"max_norm": 0.5}])
@pytest.mark.parametrize("outside", [False, True])
def test_a_function_that_raises_leaves_the_gradients_of_a_donating_step(
    bound: dict[str, float], outside: bool
) -> None:
    def reduced(slots: Any, grads: Any, ctx: Any) -> Any:
        if fails:
            raise ArithmeticError("by hand")
        return slots, grads

    fails = True
    raising = fzero.transform(name="raising", reduced=reduced)
    held: list[Any] = []

    def fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(lambda p: (p["a"] * x).sum(), state)()
        held.append(state)
        return fzero.apply_gradients(state), value

    step: Any = fzero.clip(raising(fn), **bound) if outside else raising(fzero.clip(fn, **bound))
    step = fzero.shard(fzero.scale_loss(step, 8.0), stage=2, donate=True)
    state = step.init(P, fzero.optim.sgd(1.0))
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="by hand"):
        step(state, x)
    assert torch.equal(fzero.gradients(held[0])["a"], x)
    fails = False
    state, _ = step(state, x)
    assert int(state.step) == 1


@pytest.mark.parametrize("name", [one.name for one in BUILTINS if one.slots])
def test_a_name_under_which_fzero_keeps_slots_is_taken(name: str) -> None:
    with pytest.raises(LayoutError, match="taken"):
        fzero.transform(name=name, reduced=lambda slots, grads, ctx: (slots, grads))
