"""16-bit parameters, their fp32 masters, and what a user writes to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from tests.adapter.plain import STAGES, Draw
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


class Low(nn.Module):
    """bf16; the gradient of each parameter is its factor, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.v = nn.Parameter(torch.full((2, 3), -2.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum() + (self.v * x[:6].view(2, 3)).sum()


def low_gradients(world_size: int, number: int, rank: int | None = None) -> Tensor:
    """Whole multiples of W, so that sums and means are exact in bf16; or their mean."""
    each = [
        world_size * Draw(r, number).whole(7, dtype=torch.float32) + world_size
        for r in range(world_size)
    ]
    return each[rank] if rank is not None else torch.stack(each).mean(0)


LOW_LR = 2.0**-10  # an update that bf16 cannot hold: 1 - 2**-10 rounds to 1


def masters_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        for masters in (True, False):
            module = Low()
            # On a CPU torch's fused SGD rounds bf16 in another way from 16 elements on.
            optimizer = torch.optim.SGD(module.parameters(), lr=LOW_LR, fused=False)
            engine = Engine(module, optimizer, stage=stage, master_weights=masters)
            kind = torch.float32 if masters else torch.bfloat16
            w, v = torch.ones(7, dtype=kind), torch.full((2, 3), -2.0, dtype=kind)
            for number in range(20):
                engine(low_gradients(world_size, number, rank).bfloat16()).backward()
                engine.step()
                mean = low_gradients(world_size, number).to(kind)
                w.sub_(mean, alpha=LOW_LR)
                v.sub_(mean[:6].view(2, 3), alpha=LOW_LR)
            label = f"stage {stage}, W={world_size}, masters {masters}"
            found = engine.full_parameters()
            assert found["w"].dtype == kind and torch.equal(found["w"], w), label
            assert torch.equal(found["v"], v), label
            engine.close()
            assert module.w.dtype == torch.bfloat16 and torch.equal(module.w, w.bfloat16()), label
            assert torch.equal(module.v, v.bfloat16()), label


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_masters_gather_updates_that_bf16_cannot_hold_and_without_them_they_are_lost(
    world_size: int,
) -> None:
    run_ranks(masters_body, world_size)


def write(engine: Engine, how: str, value: Tensor) -> None:
    module = engine.module
    if how == "load_state_dict":
        module.load_state_dict({"w": value, "v": module.get_parameter("v").detach().clone()})
        return
    with torch.no_grad():
        if how == "copy_":
            module.get_parameter("w").copy_(value)
        elif how == "one element":
            module.get_parameter("w")[2] = value[2]
        else:
            engine.set_full_parameter("w", value)


def written_body(rank: int, world_size: int, hows: list[str], stages: tuple[int, ...]) -> None:
    value = (torch.arange(7) + 5).bfloat16()
    ones = torch.full((7,), float(world_size), dtype=torch.bfloat16)
    for stage in stages:
        for how in hows:
            module = Low()
            optimizer = torch.optim.SGD(module.parameters(), lr=LOW_LR)
            engine = Engine(module, optimizer, stage=stage)
            for at in range(3):
                if at == 1:
                    write(engine, how, value)
                engine(ones).backward()
                engine.step()
            share = LOW_LR * world_size
            new = value.float() - 2 * share
            if how == "one element":  # the others keep the low bits that bf16 does not show
                new = torch.where(torch.arange(7) == 2, new, torch.ones(7) - 3 * share)
            found = engine.full_parameters()
            label = f"{how}, stage {stage}, W={world_size}"
            assert torch.equal(found["w"], new), f"{label}: {found['w'].tolist()}"
            assert torch.equal(found["v"], torch.full((2, 3), -2.0) - 3 * share), label
            engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_user_writes_to_a_bf16_parameter_reaches_its_master(world_size: int) -> None:
    run_ranks(
        written_body, world_size, ["copy_", "load_state_dict", "one element", "set"], (0, 1, 2)
    )
    run_ranks(written_body, world_size, ["set"], (3,))
