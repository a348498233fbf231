"""Tools and transforms of states on a part of a mesh: what they say is true, or they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError, LayoutError, MismatchError
from tests.experts_on_axes import meshes, mine_of
from tests.strategies import integers, same

MESH = fzero.Mesh({"data": 2, "expert": 2})
PARAMS: dict[str, Any] = {
    "dense": {"w": integers((3, 3), 1, bound=2)},
    "experts": {"up": integers((2, 3, 3), 2, bound=2)},
}
OF_A_RANK = {"dense": PARAMS["dense"], "experts": {"up": PARAMS["experts"]["up"][:1]}}
XS = integers((4, 2, 3), 5, bound=3)
RULES = {"dense": fzero.optim.sgd(0.125), "experts": fzero.optim.sgd(0.125)}
STAGES: list[Any] = [0, 2, {"dense": 3, "experts": 2}, {"dense": 2, "experts": 3}]


def loss(p: Any, x: Tensor) -> Tensor:
    """The first row goes to expert 0, the second one to expert 1."""
    rows = fzero.all_to_all(x @ p["dense"]["w"], axis="expert")
    back = fzero.all_to_all(rows @ p["experts"]["up"][0], axis="expert")
    return back.square().sum() / 64


def plain(p: Any, xs: Tensor) -> Tensor:
    y = torch.einsum("rek,ekl->rel", xs @ p["dense"]["w"], p["experts"]["up"])
    return y.square().sum() / 64 / len(xs)


def step_fn(states: Any, x: Tensor) -> Any:
    states, value = fzero.grad_and_reduce(loss, states)(x)
    return fzero.apply_gradients(states), value


def weighted(states: Any, x: Tensor) -> Any:
    states, value = fzero.grad_and_reduce(loss, states, weight=2)(x)
    return fzero.apply_gradients(states), value


def made(fn: Any = step_fn, stage: Any = 2, rules: Any = RULES) -> tuple[Any, Any, Any]:
    """(the step of one rank, the step of all, the states)."""
    step = fzero.shard(fn, stage=stage, mesh=meshes(MESH))

    def begin() -> Any:
        return step.init(mine_of(PARAMS, MESH), rules)

    return step, fzero.simulate(step, world_size=4), fzero.simulate(begin, world_size=4)()


HOW: dict[str, Any] = {
    "as it is": step_fn,
    "weighted": weighted,
    "clipped": fzero.clip(step_fn, max_norm=0.5),
    "scaled": fzero.scale_loss(step_fn, scale=fzero.DynamicScale(init_scale=8.0)),
}


@pytest.mark.parametrize("stage", STAGES, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_plan_and_trace_have_the_counts_and_the_bytes(how: str, stage: Any) -> None:
    rules = dict.fromkeys(RULES, fzero.optim.adamw(0.125))  # its kernels look for an overflow
    one, step, states = made(HOW[how], stage, rules)
    states, _ = step(states, XS)
    with fzero.count_collectives() as log:
        step(states, XS)
    plan = fzero.plan.of_step(one, OF_A_RANK, rules, XS[0], world=4, device="cpu")
    counts = log.counts(0)
    # Processes agree before a collective of a loss, virtual ranks need not: gloo/test_counted.py.
    ops = tuple(op for op in counts if op != "agree")
    assert {op: plan.collectives[op] for op in plan.collectives if op != "agree"} == {
        op: counts[op] for op in ops
    }
    sent = log.wire_bytes(0, ops=ops)
    assert sum(each.wire_bytes for each in plan.traffic if each.op != "agree") == sent
    if how == "as it is":
        trace = fzero.trace(step)(states, XS)
        assert (trace.collectives, trace.wire_bytes) == ({op: counts[op] for op in ops}, sent)


def test_check_spmd_knows_the_axes_and_names_a_place_that_differs() -> None:
    def differs(states: Any, x: Tensor) -> Any:
        if fzero.axis_index("expert"):
            fzero.psum(x)
        return step_fn(states, x)

    _, step, states = made()
    lines = fzero.check_spmd(step, states, (XS,))
    assert any("reduce_scatter data: up" in line for line in lines)
    assert any("reduce_scatter dp: w" in line for line in lines)
    _, step, states = made(differs)
    with pytest.raises(MismatchError, match=r"rank 0 has .*all_to_all expert[\s\S]*rank 1 has"):
        fzero.check_spmd(step, states, (XS,))


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_evaluate_and_bytes_and_replicas(stage: Any) -> None:
    def value(states: Any, x: Tensor) -> Any:
        return states, fzero.evaluate(loss, states)(x)

    _, step, states = made(value, stage)
    torch.testing.assert_close(step(states, XS)[1].mean(), plain(PARAMS, XS))
    fzero.simulate(fzero.check_replicas, world_size=4)(states)
    for state in states.values():
        assert fzero.state_bytes(state)["parameters"] == sum(
            flat.nbytes for flat in state.params.flats
        )
    whole = "replicated" if stage != {"dense": 2, "experts": 3} else "sharded"
    assert whole in str(fzero.plot.partition_map(states["experts"]))


def test_slots_of_a_users_transform_are_those_of_each_place_and_are_saved(tmp_path: Path) -> None:
    def begin(params: Any, ctx: Any) -> Any:
        return {"mean": {path: p.clone() for path, p in params.items()}}

    def follow(slots: Any, params: Any, ctx: Any) -> Any:
        mean = {path: m.lerp(params[path], 0.5) for path, m in slots["mean"].items()}
        return {"mean": mean}, params

    ema = fzero.transform(name="ema", init=begin, updated=follow)
    _, step, before = made(ema(step_fn))
    states, _ = step(before, XS)
    fzero.checkpoint.save(tmp_path, states["experts"])
    read = fzero.checkpoint.load(tmp_path, before["experts"])
    gradient = torch.func.grad(plain)(PARAMS, XS)
    for experts in (states["experts"], read):
        mean = fzero.simulate(lambda s: fzero.slots(s, "ema")["mean"], world_size=4)(experts)
        for rank, found in enumerate(mean["up"]):
            up, g = (tree["experts"]["up"][rank % 2] for tree in (PARAMS, gradient))
            same(found[0], up - 0.0625 * g)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "record": (
        lambda: fzero.record(made()[1], every=1)(made()[2]["experts"], XS),
        AxisError,
        r"record: .* is a part of a mesh",
    ),
    "record of several states": (
        lambda: fzero.record(made()[1], every=1)(made()[2], XS),
        LayoutError,
        "record: expected a TrainState or an Engine, got a dict",
    ),
    "state_bytes of several states": (
        lambda: fzero.state_bytes(made()[2]),
        LayoutError,
        "state_bytes: expected one TrainState, got a dict",
    ),
    "reshard": (
        lambda: fzero.reshard(made()[2]["experts"], stage=0),
        AxisError,
        r"reshard: .* is a part of a mesh",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_knows_one_place_refuses_by_name(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()
