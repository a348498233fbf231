"""What does not learn crosses ranks as it is, whatever encodes the parameters that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero

CODECS = {"int8": fzero.codecs.int8(), "fp8": fzero.codecs.fp8()}
PACKED = torch.arange(35, dtype=torch.int16).mul(937).view(7, 5)  # NaN patterns among them
PARAMS: dict[str, Tensor] = {
    "w": torch.ones(4, 3),
    "packed": nn.Parameter(PACKED.view(torch.bfloat16), requires_grad=False),
    "fp8": nn.Parameter(torch.ones(6, 2).to(torch.float8_e4m3fn), requires_grad=False),
    "index": torch.arange(5),
}


@pytest.mark.parametrize("name", CODECS)
def test_frozen_parameters_keep_their_bits(name: str) -> None:
    seen: list[dict[str, Tensor]] = []

    def loss(params: Any, x: Tensor) -> Tensor:
        seen.append({path: p.detach().clone() for path, p in params.items()})
        return (params["w"] * x).sum()

    def step_fn(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    encoded = fzero.compress(step_fn, parameters=CODECS[name])
    step: Any = fzero.simulate(fzero.shard(encoded, stage=3), world_size=2)
    state = step.init(PARAMS, fzero.optim.sgd(0.1))
    assert [group.codec for group in state.setup.layout.groups] == [CODECS[name], None, None, None]
    step(state, torch.ones(2))
    assert len(seen) == 2
    for params in seen:
        for path in ("packed", "fp8", "index"):
            mine, given = (x[path].detach().view(torch.uint8) for x in (params, PARAMS))
            assert torch.equal(mine, given), path


def test_a_state_of_which_nothing_learns_goes_through_the_step() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        return state, fzero.evaluate(lambda p, x: p["index"].sum() * x, state)(x)

    encoded = fzero.compress(step_fn, parameters=CODECS["int8"])
    step: Any = fzero.simulate(fzero.shard(encoded, stage=3), world_size=2)
    state = step.init(PARAMS, fzero.optim.no_optimizer())
    assert step(state, torch.ones(2))[1].tolist() == [10.0, 10.0]


def test_a_frozen_leaf_in_the_unit_of_one_that_learns_keeps_its_bits() -> None:
    frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
    seen: list[Tensor] = []

    def loss(params: Any, x: Tensor) -> Tensor:
        seen.append(params["layer"]["frozen"].clone())
        return (params["layer"]["w"] * x).sum()

    def step_fn(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(loss, state)(x)

    encoded = fzero.compress(step_fn, parameters=CODECS["int8"])
    step: Any = fzero.simulate(fzero.shard(encoded, stage=3), world_size=2)
    params = {"layer": {"w": torch.ones(4), "frozen": frozen}}
    step(step.init(params, fzero.optim.sgd(0.1)), torch.ones(2))
    assert len(seen) == 2 and all(torch.equal(x, frozen) for x in seen)
