"""On real ranks: second order in the loss, equal to unsharded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fzero
from tests.behaviours.networks import PLACES, Tensors, mean_gradient, per_rank, regression
from tests.behaviours.test_second_order import INSIDE, PARAMS
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def inside_everywhere(rank: int, world_size: int) -> dict[Any, Tensors]:
    """The gradient of each loss at each place."""
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    x, y = (t[rank] for t in regression(world_size, 4, 3, 2))
    found = {}
    for stage, reshard in PLACES:
        for name, (loss, _) in INSIDE.items():
            state = fzero.init(
                PARAMS, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard
            )
            state, _ = fzero.grad_and_reduce(loss, state)(x, y)
            found[stage, reshard, name] = fzero.gradients(state)
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_inside_the_loss(ranks: int) -> None:
    batches = per_rank(*regression(ranks, 4, 3, 2))
    want = {name: mean_gradient(known, PARAMS, batches) for name, (_, known) in INSIDE.items()}
    for found in run_ranks(inside_everywhere, ranks):
        for (*place, name), got in found.items():
            message = f"{name} at {place}"
            torch.testing.assert_close(got, want[name], rtol=1e-9, atol=1e-12, msg=message)
