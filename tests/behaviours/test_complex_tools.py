"""Complex parameters under fzero.diff, fzero.plan and fzero.certify."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.behaviours.test_complex import Spectral, batches


def run_of(stage: int, ranks: int, factor: float = 1.0) -> fzero.tools.Run:
    apply, params = fzero.functionalize(Spectral())

    def one(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            return factor * apply(p, x).square().mean()

        state, value = fzero.grad_and_reduce(loss, state)()
        return fzero.apply_gradients(state), value

    return fzero.tools.Run(
        step=fzero.shard(one, stage=stage),
        params=params,
        batches=[batches(0, 6).view(ranks, -1, 3)],
        optimizer=fzero.optim.sgd(0.1),
        world_size=ranks,
    )


def test_tools_see_complex_parameters_or_say_that_they_do_not() -> None:
    assert fzero.diff(run_of(0, 1), run_of(3, 3)) is None
    found = fzero.diff(run_of(0, 1), run_of(2, 2, factor=2.0))
    assert found is not None and found.operation == "loss"
    with torch.device("meta"):
        model, x = Spectral(torch.complex64), torch.empty(4, 3)
    planned = fzero.plan(model, x, world=4, stage=3, loss=lambda m, x: m(x).square().sum())
    assert "parameters" in str(planned)
    with pytest.raises(LayoutError, match="certify: w is complex"):
        fzero.certify(Spectral(), lambda m, x: m(x).sum(), [batches(0, 1)[0]])
