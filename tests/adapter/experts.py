"""A model of which each call uses some parts, and an optimizer that moves whatever it steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from tests.adapter.nets import linear

EXPERTS = 4
X = torch.ones(1, 3, dtype=torch.float64)


class Experts(nn.Module):
    """A part that is always used, and others that a call chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.head = linear(3, 3), linear(3, 1)
        self.experts = nn.ModuleList(linear(3, 3) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        h = self.stem(x)
        for i in chosen:
            h = h + self.experts[i](x)
        return self.head(h).sum()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two param groups, of which one decays."""
    flat = [p for p in module.parameters() if p.ndim == 1]
    rest = [p for p in module.parameters() if p.ndim > 1]
    groups = [{"params": rest, "weight_decay": 0.5}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """Its first step is another one than those that follow."""
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.5}
    return torch.optim.SGD(module.parameters(), lr=0.1, **options)


def nadam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(module.parameters(), lr=0.1, weight_decay=0.1)


def stepping(stage: int, optimizer_of: Any = adamw, **options: Any) -> Engine:
    """An engine whose update moves whatever it steps."""
    module = Experts()
    return Engine(module, optimizer_of(module), stage=stage, **options)


def close_to(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def moved(engine: Engine, before: dict[str, Tensor]) -> set[str]:
    """The parts of which a weight has other values than before: ("stem", "head", "0", ...)."""
    after = engine.full_parameters()
    paths = {path for path in before if not torch.equal(before[path], after[path])}
    return {path.split(".")[-2] for path in paths if path.endswith("weight")}
