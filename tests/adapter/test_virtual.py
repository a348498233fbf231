"""Law 8: engines on virtual ranks of one process give the numbers of real ones, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)


def make_model() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Embedding(7, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 7, bias=False)
    )
    model[-1].weight = model[0].weight
    return model.double()


def train(tokens: Tensor, stage: int) -> Tensor:
    """Two updates, the second from a window of two backwards; all parameters, flat."""
    engine = Engine(make_model(), torch.optim.AdamW, stage=stage, bucket_bytes=100, max_norm=0.5)
    engine(tokens).square().mean().backward()
    engine.step()
    with engine.coalesce():
        for part in tokens.split(1):
            engine(part).square().mean().backward()
    engine.step()
    found = torch.cat([p.flatten() for p in engine.full_parameters().values()])
    engine.close()
    return found


def tokens_of(rank: int) -> Tensor:
    return (torch.arange(8).view(2, 4) * (rank + 2) + rank) % 7


def on_gloo(rank: int, world_size: int) -> list[Tensor]:
    return [train(tokens_of(rank), stage) for stage in STAGES]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_virtual_ranks_and_gloo_ranks_give_the_same_bits(world_size: int) -> None:
    real = run_ranks(on_gloo, world_size)
    tokens = torch.stack([tokens_of(rank) for rank in range(world_size)])
    for stage in STAGES:

        def virtual(tokens: Tensor, stage: int = stage) -> Tensor:
            return train(tokens, stage)

        found = fzero.simulate(virtual, world_size=world_size)(tokens)
        for rank in range(world_size):
            assert torch.equal(found[rank], real[rank][stage]), f"stage {stage}, rank {rank}"
            assert torch.equal(found[rank], found[0])


@pytest.mark.parametrize("features", [(3, 3), (3, 5)])
def test_virtual_ranks_come_to_two_engines_of_stage_3_in_another_order(
    features: tuple[int, int],
) -> None:
    def outputs(x: Tensor) -> Tensor:
        modules = []
        for seed, width in enumerate(features):
            torch.manual_seed(seed)
            modules.append(nn.Linear(3, width))
        plain = [module(x).sum().item() for module in modules]
        engines = [Engine(module, torch.optim.SGD, stage=3) for module in modules]
        order = [0, 1] if fzero.axis_index() == 0 else [1, 0]
        found = {at: engines[at](x).sum() for at in order}
        sum(found.values()).backward()
        for engine in engines:
            engine.step()
        return torch.tensor(plain) - torch.stack([found[0], found[1]]).detach()

    for _ in range(2):  # the second run has nothing of the first
        found = fzero.simulate(outputs, world_size=2)(torch.ones(2, 1, 3))
        assert found.abs().max() < 1e-6
