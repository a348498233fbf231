"""A trace against what runs: counts by hand, counts of real steps, the numbers of its graph."""

from __future__ import annotations

import html
import re
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.state import NAMESPACE
from tests.tools.trace.steps import model, step_of

ROWS, INS, HIDDEN, OUTS = 5, 8, 16, 4


def two_layers() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return fzero.functionalize(
        nn.Sequential(nn.Linear(INS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTS))
    )


def train(apply: Any, backwards: int = 1) -> Any:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        for _ in range(backwards):
            state, loss = fzero.grad_and_reduce(lambda p, x: apply(p, x).pow(2).mean(), state)(x)
        return fzero.apply_gradients(state), loss

    return step_fn


def simulated(stage: int, world_size: int, **options: Any) -> tuple[Any, Any, Tensor]:
    apply, params = two_layers()
    step = fzero.shard(train(apply), stage=stage, **options)
    step = fzero.simulate(step, world_size=world_size)
    state = step.init(params, fzero.optim.adamw(1e-3))
    return step, state, torch.randn(world_size, ROWS, INS)


# 8 x 16 + 16 and 16 x 4 + 4 elements, each unit padded to 4 ranks x 4 elements: 144 and 80.
BY_HAND = {
    0: ({"all_reduce": 1}, 2 * 4 * 224 * 3 // 4),
    2: ({"reduce_scatter": 1, "all_gather": 1}, 2 * 4 * 224 * 3 // 4),
    # Forward gathers both units, backward the second one: no gradient of the input is wanted.
    3: ({"all_gather": 3, "reduce_scatter": 2}, 4 * (144 + 80 + 80 + 144 + 80) * 3 // 4),
}


@pytest.mark.parametrize("stage", BY_HAND)
def test_counts_are_those_made_by_hand(stage: int) -> None:
    trace = fzero.trace(*simulated(stage, 4)[:1])(*simulated(stage, 4)[1:])
    assert (trace.collectives, trace.wire_bytes) == BY_HAND[stage]
    products = ROWS * INS * HIDDEN + ROWS * HIDDEN * OUTS
    assert trace.flops == 2 * (products + products + ROWS * HIDDEN * OUTS)
    assert trace.exchanges == (4 if stage == 3 else 3)
    phases = [op.phase for op in trace.ops]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert {op.name for op in trace.ops if op.phase == "forward"} >= {"addmm", "relu", "mean"}
    reductions = [op for op in trace.ops if op.name in ("all_reduce", "reduce_scatter")]
    assert {op.phase for op in reductions} == {"backward"}


@settings(max_examples=5, deadline=None)
@given(
    stage=st.integers(0, 3),
    mesh=st.sampled_from([(1, 2), (1, 3), (2, 2)]),
    coalesces=st.booleans(),
    clips=st.booleans(),
    data=st.data(),
)
def test_it_makes_the_collectives_that_the_step_makes(
    stage: int, mesh: tuple[int, int], coalesces: bool, clips: bool, data: st.DataObject
) -> None:
    world_size = mesh[0] * mesh[1]
    apply, params = fzero.functionalize(model("cpu"))
    options = {"stage": stage, "mesh": mesh, "coalesces": coalesces, "clips": clips}
    step = fzero.simulate(step_of(apply, options), world_size=world_size)
    state = step.init(params, fzero.optim.adamw(1e-3))
    x = torch.zeros(world_size, 3, 5)
    rank = data.draw(st.integers(0, world_size - 1))
    trace = fzero.trace(step, rank=rank)(state, x)
    state, _ = step(state, x)
    with fzero.count_collectives() as log:
        step(state, x)
    # But for rounds between hosts: virtual ranks make fewer than processes (gloo/test_counted.py).
    told, traced = (
        [(e.op, e.axis, e.numel, e.wire_bytes, e.paths) for e in one.of(rank) if e.op != "agree"]
        for one in (log, trace.log)
    )
    assert told == traced
    assert trace.wire_bytes == sum(bytes_ for op, _, _, bytes_, _ in told if op != "agree")
    named = [op.detail for op in trace.ops if op.is_collective and ": " in op.detail]
    assert all(path in " ".join(named) for path in ("0.weight", "2.weight"))


@pytest.mark.floor
@pytest.mark.parametrize("stage", range(4))
def test_the_graph_computes_what_the_step_does(stage: int) -> None:
    apply, params = two_layers()
    step = fzero.shard(fzero.clip(train(apply, 2), max_norm=0.1), stage=stage)
    state = step.init(params, fzero.optim.adamw(1e-2))
    x = torch.randn(ROWS, INS)
    trace = fzero.trace(step)(state, x)
    given: Any = (state, x)
    outs = trace.graph(*optree.tree_leaves(given, namespace=NAMESPACE))
    made: Any = step(state, x)
    wanted = optree.tree_leaves(made, namespace=NAMESPACE)
    torch.testing.assert_close(outs, wanted)
    assert [value.path for value in trace.outputs][-1] == "aux"
    assert len(trace.outputs) == len(wanted)


def test_live_bytes_are_those_counted_by_hand() -> None:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        a = torch.cat((x, x))  # 2 x
        b = torch.cat((a, a))  # 4 x
        return state, b.sum()

    state: Any = fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(1.0), stage=0)
    held = sum(leaf.nbytes for leaf in optree.tree_leaves(state, namespace=NAMESPACE))
    trace = fzero.trace(step_fn)(state, torch.ones(100))
    assert [op.name for op in trace.ops] == ["cat", "cat", "sum"]
    assert list(trace.live_bytes) == [
        held + 400 * n + extra for n, extra in ((3, 0), (7, 0), (5, 4))
    ]
    assert trace.peak_bytes == held + 2800


def test_it_is_printed_like_a_jaxpr() -> None:
    step, state, x = simulated(2, 4)
    lines = str(fzero.trace(step, rank=3)(state, x)).splitlines()
    assert lines[0].endswith("on rank 3 of 4")
    assert "    g:f32[5,8] = args[0]" in lines
    stars = [line.split(" = ")[1] for line in lines if line.startswith("  * ")]
    paths = "<dp: 0.weight, 0.bias, 2.weight, 2.bias> 672 bytes sent"
    assert [line.split("   ")[1] for line in stars] == [paths] * 2
    assert [line.split()[0] for line in stars] == ["reduce_scatter", "all_gather"]
    order = [lines.index(name) for name in ("inputs", "forward", "backward", "update", "outputs")]
    assert order == sorted(order)
    assert sum("pointwise ops" in line for line in lines) <= 3 and len(lines) < 50


def test_two_stages_differ_where_they_gather() -> None:
    (a, b), (c, d) = simulated(2, 2)[1:], simulated(3, 2)[1:]
    two, three = fzero.trace(simulated(2, 2)[0])(a, b), fzero.trace(simulated(3, 2)[0])(c, d)
    found = two.diff(three)
    assert not found.equal and found
    assert found.first[0] is not None and found.first[0].name == "addmm"
    assert found.first[1] is not None and found.first[1].name == "all_gather"
    assert "+* all_gather -> f32[144]   <dp: 0.weight, 0.bias>" in found.lines
    again = two.diff(fzero.trace(simulated(2, 2)[0])(a, b))
    assert again.equal and str(again) == "the same"


def test_coalescing_leaves_one_reduction() -> None:
    apply, params = two_layers()
    traces = []
    for wrap in (lambda fn: fn, fzero.coalesce):
        step = fzero.simulate(fzero.shard(wrap(train(apply, 3)), stage=2), world_size=2)
        state = step.init(params, fzero.optim.sgd(0.1))
        traces.append(fzero.trace(step)(state, torch.zeros(2, ROWS, INS)))
    assert [trace.collectives["reduce_scatter"] for trace in traces] == [3, 1]
    assert sum("reduce_scatter" in line for line in traces[0].diff(traces[1]).lines) >= 2


def test_what_cannot_be_traced_says_so() -> None:
    step, state, x = simulated(0, 2)
    with pytest.raises(AxisError, match=r"trace the simulated step"):
        fzero.trace(step.inner)(state, x)
    with pytest.raises(LayoutError, match=r"rank=2, .* has ranks 0 to 1"):
        fzero.trace(step, rank=2)(state, x)
    with pytest.raises(LayoutError, match=r"shape \(3, 8\); dim 0 must be the 2 ranks"):
        fzero.trace(step)(state, torch.zeros(3, INS))

    def reads(state: Any, x: Tensor) -> tuple[Any, Any]:
        return state, x if x.sum() > 0 else -x

    with pytest.raises(PhaseError, match="reads values of a tensor"):
        fzero.trace(fzero.simulate(fzero.shard(reads, stage=0), world_size=2))(state, x)
    with pytest.raises(LayoutError, match="trace: there is no TrainState"):
        fzero.trace(step)()
    with pytest.raises(LayoutError, match="called already"):
        fzero.trace(torch.ones(2))  # type: ignore


def test_a_notebook_shows_the_text_with_its_collectives_marked() -> None:
    step, state, x = simulated(3, 4)
    trace = fzero.trace(step)(state, x)
    shown = trace._repr_html_()
    assert shown.startswith("<pre") and shown.endswith("</pre>")
    assert shown.count("<mark>") == sum(op.is_collective for op in trace.ops) == 5
    assert "<b>forward</b>" in shown and "&lt;dp: 0.weight, 0.bias&gt;" in shown
    plain = re.sub("<[^>]*>", "", shown)
    assert html.unescape(plain) == str(trace)


def test_a_simulated_rank_has_the_memory_of_one() -> None:
    apply, params = two_layers()
    step = fzero.shard(train(apply), stage=3)
    alone = fzero.trace(step)(step.init(params, fzero.optim.adamw(1e-3)), torch.randn(ROWS, INS))
    among = fzero.trace(*simulated(3, 1)[:1])(*simulated(3, 1)[1:])
    assert alone.live_bytes == among.live_bytes
    first = fzero.trace(*simulated(3, 4)[:1])(*simulated(3, 4)[1:]).ops[0].alive
    assert (first.parameters, first.optimizer) == (4 * (36 + 20), 4 * 2 * (36 + 20) + 8)
    assert first.other == 4 * ROWS * INS + 8  # the batch of one rank, and the count of steps


def test_keys_of_states_may_look_like_fields() -> None:
    def step_fn(states: Any, x: Tensor) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            return sum((p["w"] * x).sum() for p in params.values())  # type: ignore[return-value]

        states, value = fzero.grad_and_reduce(loss, states)(x)
        return fzero.apply_gradients(states), value

    keys = ("a.params", "b]", "c")
    step = fzero.shard(step_fn, stage=dict.fromkeys(keys, 2))
    states = step.init({key: {"w": torch.ones(2)} for key in keys}, fzero.optim.sgd(1.0))
    trace = fzero.trace(step)(states, torch.ones(2))
    found = {value.path: value.parameter for value in trace.inputs if value.parameter}
    assert found == {f"state[{key!r}].params.flats[0]": "w" for key in keys}
    assert trace.ops[0].alive.parameters == 3 * 8
