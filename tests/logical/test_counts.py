"""What logical ranks cost on the wire: where each rank carries one, what a reduce-scatter costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.state import logical
from fzero.state.logical import carried

SIZE = 512  # elements, whole blocks on each number of ranks here


def step_fn(state: Any, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sin().sum(), state)(x)
    return fzero.apply_gradients(state), loss


def counted(ranks: int, stage: int, **options: Any) -> fzero.CollectiveLog:
    """The collectives of one update of SIZE elements in fp32."""
    logical = options.get("logical_ranks", ranks)

    def run() -> None:
        step: Any = fzero.shard(step_fn, stage=stage, **options)
        state = step.init({"w": torch.ones(SIZE)}, fzero.optim.sgd(0.1))
        rows = len(state.setup.carried(state.setup.axis.rank))
        with fzero.count_collectives() as log:
            step(state, torch.ones(rows, SIZE))
        logs.append(log)

    logs: list[fzero.CollectiveLog] = []
    fzero.simulate(run, world_size=ranks)()
    assert logical
    return logs[-1]


def parameters(log: fzero.CollectiveLog, rank: int, *ops: str) -> int:
    """Bytes that a rank sends of parameters and gradients."""
    return sum(e.wire_bytes for e in log.of(rank) if e.paths and e.op in ops)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_logical_rank_on_each_costs_a_reduce_scatter(ranks: int, stage: int) -> None:
    plain = counted(ranks, stage)
    logical = counted(ranks, stage, logical_ranks=ranks)
    for rank in range(ranks):
        sent = parameters(logical, rank, "all_to_all")
        assert sent == parameters(plain, rank, "reduce_scatter") > 0
        gathered = parameters(logical, rank, "all_gather")
        assert gathered == parameters(plain, rank, "all_gather")


@pytest.mark.parametrize("ranks", [2, 4])
def test_at_stage_0_it_costs_an_all_reduce(ranks: int) -> None:
    plain, logical = counted(ranks, 0), counted(ranks, 0, logical_ranks=ranks)
    sent = parameters(logical, 0, "all_to_all", "all_gather")
    assert sent == parameters(plain, 0, "all_reduce") > 0


@pytest.mark.parametrize(("ranks", "places"), [(2, 4), (2, 8), (3, 8), (4, 7)])
def test_several_logical_ranks_cost_a_part_of_each_node(ranks: int, places: int) -> None:
    log = counted(ranks, 2, logical_ranks=places)
    whole = -(-SIZE // ranks // 64) * 64 * ranks  # padded to blocks
    for rank in range(ranks):
        run = carried(rank, ranks, places)
        nodes = len(logical.nodes(run.start, run.stop, places))
        sent = parameters(log, rank, "all_to_all")
        assert sent == nodes * whole // ranks * (ranks - 1) * 4


def test_without_logical_ranks_nothing_is_exchanged() -> None:
    assert "all_to_all" not in counted(2, 2).counts()
