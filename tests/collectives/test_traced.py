"""On real ranks: make_fx sees through the collectives; linearize is refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.state import NAMESPACE
from tests.collectives.maps import MAPS
from tests.collectives.test_derivatives import hvp_unsharded, inputs, on_rank, unsharded
from tests.covering import covered
from tests.descends import descends
from tests.oracle import linear_loss, train
from tests.ranks import run_ranks
from tests.strategies import integers, same

pytestmark = pytest.mark.xdist_group("gloo")
ADJOINT = {"gather": "reduce_scatter", "scatter": "all_gather", "reduce": "all_reduce"}
ADJOINT |= {"exchange": "all_to_all", "permute": "ppermute", "back": "ppermute"}


def collectives_in(graph: torch.fx.GraphModule) -> list[str]:
    """The names of fzero's collectives in a traced graph, in order."""
    found = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in found if name.startswith("fzero.")]


def traced(rank: int, world_size: int, name: str, xs: Tensor, vs: Tensor, ws: Tensor) -> Any:
    """grad and jvp(grad) of one rank's loss, traced with other numbers than they are run with."""

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(on_rank(name))(x, ws[rank])

    def hvp(x: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(gradient, (x,), (v,))[1]

    ones = torch.ones_like(xs[rank])
    faking: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    first = make_fx(gradient, **faking)(ones)  # by the shape rules, without a collective
    second = make_fx(hvp)(ones, ones.clone())
    return first(xs[rank]), second(xs[rank], vs[rank]), collectives_in(first)


@pytest.mark.parametrize("name", sorted(MAPS))
def test_derivatives_can_be_traced(name: str) -> None:
    xs, vs, ws = inputs(name, 2, 1, 2)
    gradient = torch.func.grad(unsharded(name, ws))(xs)
    hvp = hvp_unsharded(name, xs, vs, ws)
    for rank, got in enumerate(run_ranks(traced, 2, name, xs, vs, ws)):
        same(got[:2], (gradient[rank], hvp[rank]))
        assert got[2] == [MAPS[name].run.__name__, ADJOINT[name]]


def traced_step(
    rank: int, world_size: int, stage: int, donate: bool, params: Any, xs: Tensor
) -> Any:
    """Two steps of one traced graph, from states that it was not traced with."""

    step_fn = descends(linear_loss)
    step = fzero.shard(fzero.coalesce(step_fn), stage=stage, donate=donate)
    state = step.init(params, fzero.optim.sgd(2.0**-8, momentum=0.5))
    leaves, treespec = optree.tree_flatten(state, namespace=NAMESPACE)

    def flat(x: Tensor, *leaves: Tensor) -> list[Tensor]:
        old: Any = optree.tree_unflatten(treespec, leaves)
        new, loss = step(old, x)
        assert optree.tree_structure(new, namespace=NAMESPACE) == treespec
        return [loss, *optree.tree_leaves(new, namespace=NAMESPACE)]

    graph = make_fx(flat)(torch.zeros_like(xs[0, rank]), *[leaf.clone() for leaf in leaves])
    for x in xs[:, rank]:
        _, *leaves = graph(x, *leaves)
    new: Any = optree.tree_unflatten(treespec, leaves)
    return fzero.full_params(new), new.step, collectives_in(graph)


REDUCE = {0: ["all_reduce"], 1: ["reduce_scatter", "all_gather"]}
REDUCE |= {2: REDUCE[1], 3: ["all_gather", "reduce_scatter"]}


@covered(donate=[False, True], stage=range(4))
def test_a_whole_step_can_be_traced(stage: int, donate: bool) -> None:
    params = {"w": integers((3, 5), 1), "b": integers((3,), 2), "s": integers((), 3)}
    xs = integers((2, 3), 4)
    batches = [list(x) for x in xs]
    make = partial(torch.optim.SGD, lr=2.0**-8, momentum=0.5)
    want = train(linear_loss, params, batches, make)
    for got, count, ops in run_ranks(traced_step, 3, stage, donate, params, xs):
        same(got, want)
        assert count == 2
        assert ops == REDUCE[stage]


def linearized(rank: int, world_size: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, push = torch.func.linearize(lambda x: fzero.all_gather(x) ** 2, torch.ones(2))
    return push(torch.ones(2))


def test_linearize_is_refused() -> None:
    for kind, message in run_ranks(linearized, 2, raises=True):
        assert kind == "AxisError"
        assert "torch.func.linearize over a collective" in message
        assert "Fix: use torch.func.jvp" in message
