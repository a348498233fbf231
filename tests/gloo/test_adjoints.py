"""Adjoints of collectives in processes: losses whose ranks give, and use, other things."""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
from tests.collectives.graphs import Graph, graph_of, on_rank, params_of, right
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

GRAPHS = 12
"""In one run of processes, at each stage in turn; four of them with derivatives in the loss."""


def _by_state(graph: Graph, params: dict[str, Tensor], x: Tensor, stage: int) -> Any:
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, bucket_bytes=16)
    state, _ = fzero.grad_and_reduce(on_rank(graph), state)(x)
    return fzero.full_gradients(state)


class Leaves(torch.nn.Module):
    """The leaves of a graph as a module."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in params.items():
            setattr(self, name, torch.nn.Parameter(value.clone()))

    def forward(self, graph: Graph, x: Tensor) -> Tensor:
        return on_rank(graph)(dict(self.named_parameters()), x)


def _by_engine(graph: Graph, params: dict[str, Tensor], x: Tensor, stage: int) -> Any:
    model = Leaves(params)
    engine = Engine(model, fzero.optim.sgd(0.1), stage=stage, bucket_bytes=16)
    loss = model(graph, x)
    # A loss without a parameter anywhere near has no backward, as in torch.
    engine.backward(loss + 0 * sum(p.sum() for p in model.parameters()))
    found = engine.full_gradients()
    engine.close()
    return {name: torch.zeros_like(params[name]) if g is None else g for name, g in found.items()}


def _all(rank: int, size: int, driver: Any) -> list[Any]:
    warnings.filterwarnings("ignore", message=".*requires no grad|.*by no parameter")
    found = []
    for seed in range(GRAPHS):
        random = Random(f"{size} {seed}")
        graph = graph_of(random, ranks=size, inner=bool(seed // 4 % 2))
        params, xs = params_of(graph, random)
        got = driver(graph, params, xs[rank], seed % 4)
        wanted = right(graph, params, xs)
        found += [(seed, name) for name in wanted if not torch.allclose(got[name], wanted[name])]
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("driver", [_by_state, _by_engine])
def test_gradients_are_those_of_one_process(driver: Any, size: int) -> None:
    assert run_ranks(_all, size, driver, timeout_s=60) == [[]] * size


def _plain(rank: int, size: int, seed: int, stage: int) -> None:
    random = Random(seed)
    graph = graph_of(random, ranks=size)
    params, xs = params_of(graph, random)
    model = Leaves(params)
    engine = Engine(model, fzero.optim.sgd(0.1), stage=stage, bucket_bytes=16)
    model(graph, xs[rank]).backward()
    engine.step()


@pytest.mark.parametrize(("size", "seed", "stage"), [(2, 5, 1), (3, 112, 0)])
def test_a_plain_backward_that_comes_to_other_calls_raises_on_all(
    size: int, seed: int, stage: int
) -> None:
    """Behind a first gradient one rank goes on to an adjoint, and another one ends."""
    for name, text in run_ranks(_plain, size, seed, stage, raises=True, timeout_s=20):
        assert name == "MismatchError"
        assert "engine.backward(loss)" in text
