"""On gloo: ranks that a collective of a loss connects give other weights, by both drivers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.ranks import run_ranks
from tests.weights_along_axes import PARAMS, RATE, batches, by_engine, step_fn, updated

pytestmark = pytest.mark.xdist_group("gloo")


def found_by(rank: int, ranks: int, data: int, x: Tensor, counts: Tensor) -> dict[Any, Any]:
    mesh = fzero.Mesh({"data": data, "seq": ranks // data})
    own = [one.flatten(1, 2)[:, rank].contiguous() for one in (x, counts)]
    found: dict[Any, Any] = {}
    for stage in (0, 2, 3):
        step = fzero.coalesce(step_fn) if stage == 2 else step_fn
        run = fzero.shard(step, stage=stage, mesh=mesh)
        state, _ = run(run.init(PARAMS, fzero.optim.sgd(RATE)), *own)
        found["step", stage] = fzero.full_params(state)
        found["engine", stage] = by_engine(mesh, *own, scales=stage == 2, stage=stage)
    return found


@pytest.mark.parametrize(("ranks", "data"), [(2, 1), (4, 2)])
def test_an_update_is_that_of_one_process(ranks: int, data: int) -> None:
    whole = batches(data, ranks // data)
    want = updated(*whole)
    for found in run_ranks(found_by, ranks, data, *whole):
        for where, params in found.items():
            for name, x in want.items():
                assert torch.allclose(params[name], x, rtol=1e-11, atol=1e-11), (where, name)
