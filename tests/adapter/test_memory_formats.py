"""Parameters of any layout in memory: engines hold them contiguous, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from tests.ranks import run_ranks


class Scaled(nn.Module):
    """A parameter of any layout in memory."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square()


def filled(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "a slice": lambda: filled(3, 5)[:, 1:4],
    "strided": lambda: filled(3, 6)[:, ::2],
    "transposed": lambda: filled(4, 3).t(),
    "channels last": lambda: filled(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: filled(1, 4).repeat(3, 1),
}


def plain(make: Callable[[], Tensor]) -> tuple[Scaled, torch.optim.Optimizer]:
    module = Scaled(make())
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_on_one_rank_every_memory_layout_trains_as_in_plain_pytorch(
    layout: str, stage: int
) -> None:
    make = LAYOUTS[layout]
    module, optimizer = plain(make)
    mine, adamw = plain(make)
    engine = Engine(mine, adamw, stage=stage)
    x = filled(*mine.weight.shape).flip(0)
    for _ in range(3):
        module(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine(x).sum().backward()
        engine.step()
        assert torch.equal(mine.weight, module.weight)
    engine.close()
    assert adamw.param_groups[0]["fused"] is None
    for one, by in ((module, optimizer), (mine, adamw)):  # as ordinary ones again
        one(x).sum().backward()
        by.step()
    assert torch.allclose(mine.weight, module.weight, rtol=1e-13, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_by_path_is_written_whatever_the_memory_layout(layout: str) -> None:
    make = LAYOUTS[layout]
    module, optimizer = plain(make)
    mine, adamw = plain(make)
    engine = Engine(mine, adamw, stage=2)
    gradient, moment = filled(*mine.weight.shape) - 7, filled(*mine.weight.shape) / 3
    for which in range(2):
        module(gradient).sum().backward()
        engine(gradient).sum().backward()
        if which:
            module.weight.grad = gradient.clone()
            engine.set_full_gradient("weight", gradient)
            optimizer.state[module.weight]["exp_avg"].copy_(moment)
            engine.set_full_optimizer_state("weight", "exp_avg", moment)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    assert torch.allclose(mine.weight, module.weight, rtol=1e-13, atol=0)


def empty_first(rank: int, world_size: int) -> None:
    """Adagrad makes its state early; here that of an empty and of a scalar parameter."""
    for stage in range(4):
        for first in (torch.zeros(0, 3), torch.tensor(2.0), torch.ones(2)):
            params = [nn.Parameter(x) for x in (first.clone(), torch.ones(5, 3), torch.ones(()))]
            module = nn.ParameterList(params)
            reference = [nn.Parameter(p.detach().clone()) for p in params]
            options: Any = {"lr": 0.5, "initial_accumulator_value": 0.25}
            engine = Engine(module, torch.optim.Adagrad(params, **options), stage=stage)
            plain_optimizer = torch.optim.Adagrad(reference, **options)
            for _ in range(2):
                for some in (module, reference):
                    sum((p * p).sum() for p in some).backward()
                engine.step()
                plain_optimizer.step()
                plain_optimizer.zero_grad()
            for found, wanted in zip(engine.full_parameters().values(), reference, strict=True):
                assert torch.allclose(found, wanted, rtol=1e-6), f"stage {stage}, {first}"
            engine.close()


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_state_that_is_made_early_is_that_of_a_parameter_with_elements(world_size: int) -> None:
    run_ranks(empty_first, world_size)
