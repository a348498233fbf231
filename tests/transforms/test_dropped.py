"""A step that makes an update, or gradients, and drops them is warned of, with the line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero

ANY: Any = fzero
PARAMS = {"w": torch.arange(6.0), "b": torch.ones(3)}


def loss(p: Any, x: Tensor) -> Tensor:
    return (p["w"] * x).sum() + p["b"].square().sum()


def not_bound(state: Any, x: Tensor) -> Any:
    state, value = fzero.grad_and_reduce(loss, state)(x)
    fzero.apply_gradients(state)  # dropped
    return state, value


def another_name(state: Any, x: Tensor) -> Any:
    new, value = fzero.grad_and_reduce(loss, state)(x)
    new2 = fzero.apply_gradients(new)  # dropped
    del new2
    return new, value


def the_given_one(state: Any, x: Tensor) -> Any:
    new, value = fzero.grad_and_reduce(loss, state)(x)
    new = fzero.apply_gradients(new)  # dropped
    return state, value


def gradients_not_bound(state: Any, x: Tensor) -> Any:
    _, value = fzero.grad_and_reduce(loss, state)(x)  # dropped
    return state, value


def one_of_two(state: Any, x: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(loss, state)(x)
    after = fzero.apply_gradients(state)
    _, value = fzero.grad_and_reduce(loss, after)(x)  # dropped
    return after, value


def added(state: Any, x: Tensor) -> Any:
    fzero.add_gradients(state, {k: 2 * v for k, v in fzero.full_params(state).items()})  # dropped
    return state, x


def usual(state: Any, x: Tensor) -> Any:
    state, value = fzero.grad_and_reduce(loss, state)(x)
    return fzero.apply_gradients(state), value


def sam(state: Any, x: Tensor) -> Any:
    probe, _ = fzero.grad_and_reduce(loss, state)(x)
    near = fzero.map_params(lambda p, g: p + 0.5 * g, state, fzero.gradients(probe))
    there, value = fzero.grad_and_reduce(loss, near)(x)
    return fzero.apply_gradients(fzero.add_gradients(state, fzero.full_gradients(there))), value


def inner_updates(state: Any, x: Tensor) -> Any:
    inner, _ = fzero.grad_and_reduce(loss, state)(x)
    inner = fzero.apply_gradients(inner)
    after = fzero.evaluate(loss, inner)(x)
    return usual(state, x)[0], after


def norms(state: Any, x: Tensor) -> Any:
    probe, value = fzero.grad_and_reduce(loss, state)(x)
    return state, value + fzero.global_norm(probe)


def in_aux(state: Any, x: Tensor) -> Any:
    new, _ = usual(state, x)
    return state, {"candidate": new}


def rejected(state: Any, x: Tensor) -> Any:
    new, value = usual(state, x)
    return (new if float(fzero.evaluate(loss, new)(x)) < -1e9 else state), value


def by_replace(state: Any, x: Tensor) -> Any:
    new, value = usual(state, x)
    return new.replace(schedule=state.schedule), value


def gradients_only(state: Any, x: Tensor) -> Any:
    return fzero.grad_and_reduce(loss, state)(x)


def evaluates(state: Any, x: Tensor) -> Any:
    return state, fzero.evaluate(loss, state)(x)


SLIPS = [not_bound, another_name, the_given_one, gradients_not_bound, one_of_two, added]
SOUND = [usual, sam, inner_updates, norms, in_aux, rejected, by_replace, gradients_only, evaluates]
WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda step: step,
    "coalesce": fzero.coalesce,
    "clip": fzero.clip(max_norm=1.0),
    "accumulate": fzero.accumulate(micro_batches=1),
}


def run(step_fn: Any, wrap: Any, stage: int, ranks: int, calls: int = 3) -> list[Any]:
    step: Any = fzero.simulate(fzero.shard(wrap(step_fn), stage=stage), world_size=ranks)
    state = step.init(PARAMS, fzero.optim.adamw(0.1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(calls):
            state_after, _ = step(state, torch.ones(ranks, 6))
            del state_after
    return said


@pytest.mark.parametrize("step_fn", SLIPS)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("wrap", [WRAPS["plain"], WRAPS["coalesce"]], ids=["plain", "coalesce"])
def test_what_is_dropped_is_warned_of_once_with_its_line(
    step_fn: Any, wrap: Any, stage: int, ranks: int
) -> None:
    (one,) = run(step_fn, wrap, stage, ranks)
    with open(__file__) as source:
        line = source.read().splitlines()[one.lineno - 1]
    assert one.filename == __file__ and line.endswith("# dropped")
    assert line.partition("fzero.")[2].partition("(")[0] in str(one.message)
    assert f"{step_fn.__name__} has returned no state" in str(one.message)


@pytest.mark.parametrize("step_fn", SOUND)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (2, 2), (3, 2)])
def test_sound_steps_are_not_accused(step_fn: Any, stage: int, ranks: int) -> None:
    for name, wrap in WRAPS.items():
        if name == "coalesce" and step_fn in (sam, norms):
            continue  # they ask for gradients inside of a window
        if name == "accumulate" and step_fn is in_aux:
            continue  # a state is no aux of it
        assert [str(one.message) for one in run(step_fn, wrap, stage, ranks)] == []


def test_several_models_and_nested_steps() -> None:
    def pair(p: Any, x: Tensor) -> Tensor:
        return loss(p["g"], x) + loss(p["d"], x)

    inner = fzero.shard(usual, stage=0)

    @fzero.shard(stage=0)
    def gan(states: Any, x: Tensor) -> Any:
        both, value = fzero.grad_and_reduce(pair, states)(x)
        g = fzero.apply_gradients(both["g"])  # the gradients of d are not wanted
        d, _ = inner(states["d"], x)
        only, _ = fzero.grad_and_reduce(pair, {"g": g, "d": d}, wrt="d")(x)
        return {"g": g, "d": fzero.apply_gradients(only["d"])}, value

    states = {name: fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=0) for name in "gd"}
    gan(states, torch.ones(6))


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    @fzero.shard(stage=0)
    def raises(state: Any, x: Tensor) -> Any:
        usual(state, x)
        raise ValueError

    state = raises.init(PARAMS, fzero.optim.sgd(0.5))
    with pytest.raises(ValueError):
        raises(state, torch.ones(6))
    fzero.shard(usual, stage=0)(state, torch.ones(6))
    usual(state, torch.ones(6))  # outside of a step nobody knows what becomes of it
