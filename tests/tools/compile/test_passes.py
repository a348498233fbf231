"""Each pass: what it changes, and that every value stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, fx, nn

import fzero
from fzero.state import NAMESPACE
from fzero.tools.compile import gather_early, merge_collectives, rematerialize
from fzero.tools.compile.passes import wait_late, without_writes
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import is_collective
from fzero.tools.trace.trace import program_of
from tests.descends import descends


def open_record(step: Any, given: Any) -> AsFound:
    """A record that does not end: passes read the tensors of its graph."""
    found = AsFound("trace", step, given)
    found.look()
    return found


def recorded(stage: int, world_size: int, layers: int = 4) -> tuple[fx.GraphModule, list[Tensor]]:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())]
    apply, params = fzero.functionalize(nn.Sequential(*parts))

    step_fn = descends(lambda p, x: apply(p, x).square().mean())
    step = fzero.simulate(
        fzero.shard(step_fn, stage=stage, bucket_bytes=300), world_size=world_size
    )
    given: Any = (step.init(params, fzero.optim.sgd(0.1)), torch.randn(world_size, 3, 8))
    graph = program_of(step, given, 0, open_record(step, given)).graph
    return graph, [x[0] for x in optree.tree_leaves(given, namespace=NAMESPACE)]


def names(graph: fx.GraphModule) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.graph.nodes if is_collective(n)]


def items(graph: fx.GraphModule) -> list[int]:
    """How many buffers each collective has."""
    return [len(n.args[0]) for n in graph.graph.nodes if is_collective(n)]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_bucket_is_packed_by_one_op_which_a_compiler_makes_one_pass_of(stage: int) -> None:
    graph, _ = recorded(stage, 2)
    ops = [str(node.target) for node in without_writes(graph).graph.nodes]
    assert sum("aten.cat" in op for op in ops) == 4  # one for each layer: a matrix and a vector
    assert not [op for op in ops if "slice_scatter" in op or "empty" in op]


def test_gathers_move_together_as_far_as_memory_allows() -> None:
    unit = 4 * 80  # 8 x 8 + 8 elements, padded to 2 ranks x 4
    for units, wanted in ((0, 0), (2, 2), (4, 4)):
        graph, _ = recorded(3, 2)
        before = names(graph)
        gather_early(graph.graph, most_bytes=units * unit)
        graph.graph.lint()
        assert names(graph) == before
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        first = next(i for i, n in enumerate(nodes) if "addmm" in str(n.target))
        early = sum(is_collective(n) for n in nodes[:first])
        assert early == max(wanted, 2)  # the schedule itself gathers the next one early


@pytest.mark.parametrize(
    ("stage", "few"), [(0, ["all_reduce"]), (2, ["reduce_scatter", "all_gather"])]
)
def test_small_collectives_in_a_row_become_one(stage: int, few: list[str]) -> None:
    graph, _ = recorded(stage, 2)
    many = names(graph)
    assert len(many) > len(few)
    graph = without_writes(graph)
    wait_late(graph.graph)
    buffers = items(graph)
    merge_collectives(graph.graph, bucket_bytes=0)
    assert names(graph) == many and items(graph) == buffers  # those of one op are too large, too
    merge_collectives(graph.graph, bucket_bytes=2**20)
    graph.graph.lint()
    assert names(graph) == few


@pytest.mark.parametrize("change", [wait_late, rematerialize])
def test_values_stay(change: Callable[[fx.Graph], None]) -> None:
    graph, given = recorded(3, 1)
    wanted = graph(*given)
    graph = without_writes(graph)
    change(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert all(map(torch.equal, graph(*given), wanted))


def test_a_cheap_activation_is_computed_again_where_the_backward_reads_it() -> None:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        loss = fzero.grad_and_reduce(lambda p: ((x * 3).exp() * p["w"]).sum(), state)
        state, value = loss()
        return fzero.apply_gradients(state), value

    state: Any = fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.5), stage=0)
    given: Any = (state, torch.ones(4))
    graph = program_of(step_fn, given, None, open_record(step_fn, given)).graph
    count = [str(n.target) for n in graph.graph.nodes].count("aten.exp.default")
    assert count == 1
    rematerialize(graph.graph)
    graph.recompile()
    assert [str(n.target) for n in graph.graph.nodes].count("aten.exp.default") == 2
    leaves = optree.tree_leaves(given, namespace=NAMESPACE)
    made: Any = step_fn(*given)
    assert all(map(torch.equal, graph(*leaves), optree.tree_leaves(made, namespace=NAMESPACE)))


def test_random_numbers_of_a_transposed_tensor_stay() -> None:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        def loss(p: Any, x: Tensor) -> Tensor:
            h = torch.nn.functional.dropout((p["0"] * x).t(), 0.5)
            return (h * torch.rand_like(h) * h.detach().bernoulli(0.5)).sum()

        return fzero.grad_and_reduce(loss, state)(x)

    state = fzero.init({"0": torch.ones(3, 4)}, fzero.optim.sgd(0.5), stage=0)
    given: Any = (state, torch.ones(3, 4))
    leaves = [x.detach() for x in optree.tree_leaves(given, namespace=NAMESPACE)]
    graph = program_of(step_fn, given, None, open_record(step_fn, given)).graph
    made = []
    for one in (graph, without_writes(graph)):
        torch.manual_seed(0)
        made.append(one(*leaves))
    assert all(map(torch.equal, *made)) and made[0][-1] != 0
