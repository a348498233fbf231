"""`gathered` without `modify`: a write on any rank raises on every rank, whoever has the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, gathered, sharded_init
from fzero.errors import FzeroError, LayoutError, PhaseError
from tests.adapter.nets import F64, linear
from tests.adapter.on_ranks import on_ranks, virtually


def plain() -> nn.Module:
    torch.manual_seed(3)
    return linear(3, 3)


def unowned() -> nn.Module:
    torch.manual_seed(3)
    with sharded_init():
        return linear(3, 3)


def driven(stage: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Engine(plain(), torch.optim.SGD, stage=stage, **options).module


MADE: dict[str, Callable[[], nn.Module]] = {
    "before an engine": plain,
    "before an engine, sharded": unowned,
    "stage 0": driven(0),
    "stage 2": driven(2),
    "stage 3": driven(3),
    "stage 3, persistent": driven(3, persistence_threshold_numel=100),
}


def in_the_tensor(full: Tensor, p: Tensor) -> None:
    nn.init.constant_(full, 7.0)


def behind_the_counter(full: Tensor, p: Tensor) -> None:
    full.data.fill_(7.0)


def in_the_parameter(full: Tensor, p: Tensor) -> None:
    p.fill_(7.0)


def in_its_data(full: Tensor, p: Tensor) -> None:
    p.data.normal_()


WAYS = (in_the_tensor, behind_the_counter, in_the_parameter, in_its_data)


def write(module: nn.Module, way: Callable[[Tensor, Tensor], None], ranks: tuple[int, ...]) -> None:
    with gathered(module) as (full, _), torch.no_grad():
        if fzero.world().rank in ranks:
            way(full, module.get_parameter("weight"))


def check(made: Callable[[], nn.Module], way: Any, ranks: tuple[int, ...]) -> None:
    module, rank = made(), fzero.world().rank
    with pytest.raises(FzeroError) as caught:
        write(module, way, ranks)
    refused_at_once = isinstance(caught.value, LayoutError)
    assert refused_at_once or f"without modify, on ranks {[*ranks]}" in str(caught.value)
    assert "\nFix: " in str(caught.value) and (rank in ranks or not refused_at_once)
    sharded = type(module.get_parameter("weight")) is not nn.Parameter
    if not sharded:
        with gathered(module, modify=True) as (full, _):
            full.copy_(plain().get_parameter("weight").detach())
    with gathered(module) as (full, _):  # the ranks are in step, and the write is gone
        assert torch.equal(full, plain().get_parameter("weight").detach())


@virtually(2)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_without_modify_raises_on_every_rank(name: str, way: Any) -> None:
    for ranks in ((0,), (1,), (0, 1)):
        check(MADE[name], way, ranks)


@on_ranks(1, 2)
def test_a_write_without_modify_raises_in_processes_too(world_size: int) -> None:
    for name in ("before an engine", "before an engine, sharded", "stage 2", "stage 3"):
        check(MADE[name], in_the_parameter, (world_size - 1,))


@virtually(2)
def test_a_write_that_was_refused_and_caught_is_no_write() -> None:
    for name in ("before an engine, sharded", "stage 3"):
        module = MADE[name]()
        with gathered(module) as fulls, torch.no_grad():
            if fzero.world().rank:
                with pytest.raises(LayoutError, match="modify=True"):
                    module.get_parameter("weight").fill_(1.0)
            assert torch.equal(fulls[0], plain().get_parameter("weight"))


class Reads(nn.Module):
    """Reads, and writes on rank 1, in a block in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with gathered(self.a) as (weight, _), torch.no_grad():
            if fzero.world().rank == 1:
                weight.mul_(2.0)
        return self.a(x)


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_write_in_a_forward_raises_on_every_rank(stage: int) -> None:
    engine = Engine(Reads(), torch.optim.SGD, stage=stage)
    seen = "without modify" if fzero.world().rank else r"raised on rank \[1\]"
    with pytest.raises(FzeroError, match=seen):
        engine(torch.ones(2, 3, dtype=F64)).sum().backward()


def test_a_write_inside_of_a_block_that_may_write_names_the_inner_one() -> None:
    def on_rank() -> int:
        module = MADE["stage 3"]()
        with gathered(module, modify=True) as (weight, _):
            with pytest.raises(PhaseError, match="without modify"), gathered(module) as (again, _):
                again.zero_()
            weight.fill_(2.0)
        with gathered(module) as (weight, _):
            return int(weight.unique())

    assert fzero.simulate(on_rank, world_size=2)().tolist() == [2, 2]
