"""Tensors of inference mode, which autograd cannot use: one error that says which, and the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError


@pytest.fixture
def frozen_batch() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3, 2)


def test_a_model_made_in_inference_mode_is_refused_by_both_drivers() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 1)
    for take in (
        lambda: Engine(model, torch.optim.SGD, stage=2),
        lambda: fzero.functionalize(model),
    ):
        with pytest.raises(LayoutError, match="weight was made under torch"):
            take()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_batch_of_inference_mode_is_named_and_training_goes_on(
    stage: int, frozen_batch: Tensor
) -> None:
    seen = r"\[3, 2\], was made under inference_mode[\s\S]*x\.clone\(\)"
    engine = Engine(nn.Linear(2, 1), torch.optim.SGD, stage=stage)
    with pytest.raises(LayoutError, match=seen):
        engine(frozen_batch)
    engine(frozen_batch.clone()).sum().backward()
    assert engine.step()

    apply, params = fzero.functionalize(nn.Linear(2, 1))
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage)

    def loss(p: Any, batch: dict[str, Tensor]) -> Tensor:
        return apply(p, batch["x"]).sum()

    with pytest.raises(LayoutError, match=seen):
        fzero.grad_and_reduce(loss, state)({"x": frozen_batch})
    state, value = fzero.grad_and_reduce(loss, state)({"x": frozen_batch.clone()})
    with torch.no_grad():
        assert torch.equal(value, fzero.evaluate(loss, state)({"x": frozen_batch}))


def test_what_failed_is_said_beside_the_batch_of_inference_mode(frozen_batch: Tensor) -> None:
    seen = r"made under inference_mode; torch says: no room for 7 experts\.\n"

    class Full(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("no room for 7 experts.\nMore of it.")

    with pytest.raises(LayoutError, match=seen) as found:
        Engine(Full(2, 1), torch.optim.SGD, stage=0)(frozen_batch)
    assert isinstance(found.value.__cause__, RuntimeError)
    apply, params = fzero.functionalize(Full(2, 1))
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=3)
    with pytest.raises(LayoutError, match=seen):
        fzero.grad_and_reduce(lambda p, x: apply(p, x).sum(), state)(frozen_batch)


def test_a_misspelt_option_of_the_engine_names_the_nearest_one() -> None:
    options: dict[str, Any] = {"stgae": 2}
    with pytest.raises(
        TypeError, match=r"Engine got an unexpected keyword argument 'stgae'[\s\S]*stage="
    ):
        Engine(nn.Linear(2, 1), torch.optim.SGD, **options)
