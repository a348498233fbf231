"""Law 18 as users write programs, and their mistakes: all ranks raise, and the state is good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import AxisError, LayoutError


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("wrong", ["rows", "sizes", "weight", "weight of a part"])
def test_wrong_arguments_of_one_rank_raise_on_all(stage: int, wrong: str) -> None:
    """The others do not wait for a rank that refused its arguments, and the state is good."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).sum()

    def run() -> Tensor:
        options = {"stage": stage, "logical_ranks": 5}
        state = fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), **options)  # type: ignore
        here, given = state.setup.carried(state.setup.axis.rank), {}
        if 2 in here:
            given = {
                "rows": {},
                "sizes": {"sizes": [1]},
                "weight": {"weight": 1.0},
                "weight of a part": {"weight": lambda x: -1.0},
            }[wrong]
        rows = 3 if 2 in here and wrong == "rows" else len(here)
        seen = "grad_and_reduce: " if 2 in here else r"the step raised on rank \[1\]"
        with pytest.raises(LayoutError if 2 in here else AxisError, match=seen):
            fzero.grad_and_reduce(loss_fn, state, **given)(torch.ones(rows, 4))
        state, _ = fzero.grad_and_reduce(loss_fn, state)(torch.ones(len(here), 4))
        return fzero.full_params(fzero.apply_gradients(state))["w"]

    assert fzero.simulate(run, world_size=3)().tolist() == [[pytest.approx(0.9)] * 4] * 3
