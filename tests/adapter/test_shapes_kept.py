"""Points 10 to 12: shapes, memory formats, precision and order survive what an engine does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

STAGES = (0, 1, 2, 3)
VALUE = torch.arange(36.0, dtype=torch.float64).view(3, 4, 3, 1)


def image(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 4, 5, 5, generator=generator, dtype=torch.float64)


def conv() -> nn.Module:
    torch.manual_seed(4)
    return nn.Conv2d(4, 3, (3, 1), dtype=torch.float64)


def channels_last_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        plain = conv()
        module = conv()
        weight = module.get_parameter("weight")
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        engine = Engine(module, torch.optim.Adam, stage=stage)
        for r in range(world_size):
            (plain(image(r)).square().sum() / world_size).backward()
        engine(image(rank)).square().sum().backward()
        found = engine.full_gradients()["weight"]
        torch.testing.assert_close(found, plain.weight.grad, rtol=1e-11, atol=1e-12)
        assert torch.equal(engine.full_gradient("weight"), found)
        engine.set_full_gradient("weight", VALUE)
        engine(torch.zeros_like(image(rank))).square().sum().backward()  # adds zero to it
        assert torch.equal(engine.full_gradient("weight"), VALUE), f"stage {stage}"
        engine.step()
        assert engine.full_optimizer_state("weight", "exp_avg").shape == VALUE.shape
        engine.set_full_optimizer_state("weight", "exp_avg", VALUE)
        assert torch.equal(engine.full_optimizer_states()["weight"]["exp_avg"], VALUE)
        engine.set_full_parameter("weight", VALUE)
        assert torch.equal(engine.full_parameters()["weight"], VALUE), f"stage {stage}"
        engine.close()
        assert torch.equal(module.get_parameter("weight"), VALUE), f"stage {stage}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_channels_last_module_is_read_and_written_like_any_other(world_size: int) -> None:
    run_ranks(channels_last_body, world_size)


def test_one_rank_sends_nothing_and_so_rounds_nothing_to_what_would_be_sent() -> None:
    for stage in STAGES:
        module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        engine = Engine(module, torch.optim.SGD, stage=stage)
        with engine.coalesce():
            for x in (256.0, 1.0):  # 257 is no number of bf16
                engine(torch.tensor([[x]], dtype=torch.bfloat16)).sum().backward()
        assert engine.full_gradient("weight").item() == 257.0


def groups_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))
        module[1].requires_grad_(False)
        paths = ["2.bias", "1.weight", "0.weight"], ["0.bias", "1.bias", "2.weight"]
        optimizer = torch.optim.SGD(
            [{"params": [module.get_parameter(path) for path in group]} for group in paths], lr=0.5
        )
        engine = Engine(module, optimizer, stage=stage)
        engine(torch.ones(1, 2)).sum().backward()
        engine.step()
        engine.close()
        for group, listed in zip(optimizer.param_groups, paths, strict=True):
            wanted = [module.get_parameter(path) for path in listed]
            assert all(p is q for p, q in zip(group["params"], wanted, strict=True)), f"{stage}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_is_given_back_with_what_it_had_in_the_order_it_had_it(
    world_size: int,
) -> None:
    run_ranks(groups_body, world_size)
