"""Several rules in one optimizer, under the engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero.optim import adamw, from_torch, muon, partition
from tests.covering import covered
from tests.strategies import integers

STEPS = 4


@covered(ours=["ours", "foreign"], place=[(0, 2), (1, 3), (2, 2), (3, 3)])
def test_an_engine_takes_a_partition(ours: str, place: tuple[int, int]) -> None:
    """The numbers are those of plain torch with two optimizers."""
    (stage, ranks), batches = place, integers((STEPS, 6, 3), 5, torch.float32)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    def loss_of(module: Any, x: Tensor) -> Tensor:
        return module(x).square().mean()

    def rules() -> Any:
        made = {"ours": (muon(0.01), adamw(0.01))}.get(
            ours,
            (
                from_torch(partial(torch.optim.Muon, lr=0.01)),
                from_torch(partial(torch.optim.AdamW, lr=0.01)),
            ),
        )
        by_dims = {"matrices": made[0], "rest": made[1]}
        return partition(by_dims, lambda leaf: "matrices" if len(leaf.shape) == 2 else "rest")

    def body() -> Any:
        rank = fzero.axis_index()
        with fzero.adapter.Engine(model(), rules(), stage=stage) as engine:
            for batch in batches:
                loss_of(engine, batch.chunk(ranks)[rank]).backward()
                engine.step()
            return engine.full_parameters()

    plain = model()
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    rest = [p for p in plain.parameters() if p.ndim != 2]
    both = torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)
    for batch in batches:
        plain.zero_grad()
        loss_of(plain, batch).backward()
        for one in both:
            one.step()
    found = fzero.simulate(body, world_size=ranks)()
    for path, p in plain.named_parameters():  # a bf16 iteration may round a mean's last bit up
        torch.testing.assert_close(found[path][0], p.detach(), rtol=1e-3, atol=2e-4)
