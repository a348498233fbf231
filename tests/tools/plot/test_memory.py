"""Memory by kind: the sum is what is alive, and each kind is what it is called."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.state import NAMESPACE
from fzero.tools.plot import memory_timeline
from fzero.tools.trace import Trace
from tests.descends import descends
from tests.tools.plot.traces import assert_legible, by_hand, traced
from tests.tools.trace.steps import model, step_of


def nbytes(tree: Any, ranks: int = 1) -> int:
    leaves = optree.tree_leaves(tree, namespace=NAMESPACE)
    return sum(x.nbytes for x in leaves if isinstance(x, Tensor)) // ranks


def counted(trace: Trace) -> list[int]:
    """Bytes alive at each op, storage by storage: from its first op to its last reader."""
    nodes = list(trace.graph.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    spans: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        val = node.meta.get("val")
        for x in val if isinstance(val, list | tuple) else [val]:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                span = spans.setdefault(storage._cdata, [i, i, storage.nbytes()])
                stays = node.op != "call_function"
                ends = [order[user] for user in node.users]
                span[0] = 0 if stays else span[0]
                span[1] = max([span[1], i, *ends, *([len(nodes)] if stays else [])])
    ops = [i for i, n in enumerate(nodes) if n.op == "call_function" and "getitem" not in n.name]
    return [sum(size for a, b, size in spans.values() if a <= i <= b) for i in ops]


@settings(max_examples=4, deadline=None)
@given(
    stage=st.integers(0, 3),
    mesh=st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    coalesces=st.booleans(),
    clips=st.booleans(),
)
def test_kinds_add_up_and_are_what_the_state_holds(
    stage: int, mesh: tuple[int, int], coalesces: bool, clips: bool
) -> None:
    ranks = mesh[0] * mesh[1]
    apply, params = fzero.functionalize(model("cpu"))
    options = {"stage": stage, "mesh": mesh, "coalesces": coalesces, "clips": clips}
    step = fzero.simulate(step_of(apply, options), world_size=ranks)
    state = step.init(params, fzero.optim.adamw(1e-3))
    x = torch.zeros(ranks, 3, 5)
    trace = fzero.trace(step)(state, x)
    memory = memory_timeline(trace)
    assert [row.total for row in memory.rows] == list(trace.live_bytes) == counted(trace)
    first = memory.rows[0].alive
    assert first["parameters"] == nbytes(state.params, ranks)
    assert first["optimizer"] == nbytes(state.optimizer, ranks)
    assert memory.peak.total == trace.peak_bytes
    assert all(row.alive["parameters"] >= first["parameters"] for row in memory.rows)


@pytest.mark.parametrize("stage", range(4))
def test_before_the_update_gradients_are_those_that_a_state_holds(stage: int) -> None:
    linear = torch.nn.Linear(7, 5)
    apply, params = fzero.functionalize(linear)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return apply(p, x).square().sum()

    def only_reduce(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(loss_fn, state)(x)

    with_update = descends(loss_fn)
    held = {}
    for step_fn in (only_reduce, with_update):
        step = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=3)
        state = step.init(params, fzero.optim.sgd(0.5))
        held[step_fn] = (step, state)
    x = torch.ones(3, 4, 7)
    step, state = held[only_reduce]
    wanted = nbytes(step(state, x)[0].gradients, 3)
    assert memory_timeline(fzero.trace(step)(state, x)).rows[-1].alive["gradients"] == wanted
    step, state = held[with_update]
    rows = memory_timeline(fzero.trace(step)(state, x)).rows
    assert next(row for row in rows if row.phase == "update").alive["gradients"] == wanted
    # Whole on the rank at some time of the backward, if only in pieces; never in the forward.
    backward = [row.alive["gradients"] for row in rows if row.phase == "backward"]
    assert max(backward) >= nbytes(params)
    assert not any(row.alive["gradients"] for row in rows if row.phase == "forward")


def test_gathered_are_two_units_at_most_and_go() -> None:
    unit = 4 * (16 * 16 + 16)
    rows = memory_timeline(traced(3, layers=5)).rows
    assert max(row.alive["gathered"] for row in rows) == 2 * unit
    assert not any(row.alive["gathered"] for row in rows if row.phase == "update")
    forward = [row for row in rows if row.name == "addmm"]
    assert [row.alive["gathered"] for row in forward] == [2 * unit] * 4 + [unit]
    # The inputs of all layers but the first one, which is the batch, and what this one makes.
    assert [row.alive["activations"] for row in forward] == [4 * 4 * 16 * n for n in range(1, 6)]
    below = memory_timeline(traced(2, layers=5)).rows
    assert not any(row.alive["gathered"] for row in below)


def test_the_views_say_the_same_and_are_legible() -> None:
    memory = memory_timeline(traced(3, layers=5))
    lines = memory.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["most", "forward", "backward", "update"]
    assert sum("(peak)" in line for line in lines) == 1
    ax = memory.draw()
    assert len(memory.kinds) == 6
    assert_legible(ax.figure)
    assert memory.to_dict()["rows"][0]["alive"]["parameters"] == memory.rows[0].alive["parameters"]


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(fzero.LayoutError, match=r"Fix: give what fzero.trace\(step\)"):
        memory_timeline(lambda state: state)  # type: ignore[arg-type]
    with pytest.raises(fzero.LayoutError, match="without ops"):
        memory_timeline(by_hand([]))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_cast_of_a_parameter_counts_with_the_gathered_ones(stage: int) -> None:
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"].to(torch.bfloat16)).sum()

    step = fzero.shard(lambda s, x: fzero.grad_and_reduce(loss_fn, s)(x), stage=stage)
    step = fzero.simulate(step, world_size=2)
    state = step.init({"w": torch.ones(8, 4)}, fzero.optim.sgd(0.5))
    rows = memory_timeline(fzero.trace(step)(state, torch.ones(2, 3, 8).bfloat16())).rows
    product = next(row for row in rows if row.name == "mm")
    cast = next(row for row in rows if row.name == "_to_copy")
    full = 4 * 8 * 4 if stage == 3 else 0
    assert cast.alive["gathered"] == full + 2 * 8 * 4
    assert product.alive["gathered"] == 2 * 8 * 4
    assert product.alive["activations"] == 2 * 3 * 4
