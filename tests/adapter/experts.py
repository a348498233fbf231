"""A model of which each call uses some parts, on virtual ranks and in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.adapter.nets import linear

EXPERTS = 4


class Experts(nn.Module):
    """A part that is always used, and others that a call chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = linear(3, 3), linear(3, 1)
        self.experts = nn.ModuleList(linear(3, 3) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        h = self.stem(x)
        for i in chosen:
            h = h + self.experts[i](x)
        return self.head(h).sum()


def made() -> Experts:
    torch.manual_seed(3)
    return Experts()


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


def x_of(rank: int, update: int, call: int) -> Tensor:
    source = torch.Generator().manual_seed(100 * update + 10 * call + rank)
    return torch.randn(2, 3, dtype=torch.float64, generator=source)


Calls = Sequence[Sequence[int] | None]
"""What each call of a rank uses; None: the rank makes none."""

# By update, and then by rank.
PLAN: list[list[Calls]] = [
    [[[0], [1]], [[1], [0]], [[1], None]],  # 2 and 3 have not been used yet
    [[[2], []], [[], []], [None, None]],  # 2 by the first rank alone
    [[None, None]] * 3,  # nothing at all
    [[[0, 3], None], [[0], [3]], [[0], [0]]],
    [[[], []], [[1], []], [[3], []]],
]


class Plain(NamedTuple):
    values: dict[str, Tensor]
    states: dict[str, dict[str, Any]]


def plain(ranks: int, optimizer_of: Callable[..., Any], plan: Sequence[Sequence[Calls]]) -> Plain:
    """One process that sees the data of all ranks."""
    module = made()
    optimizer = optimizer_of(module)
    for update, row in enumerate(plan):
        optimizer.zero_grad()
        for rank in range(ranks):
            for call, chosen in enumerate(row[rank]):
                if chosen is not None:
                    (module(x_of(rank, update, call), chosen) / ranks).backward()
        optimizer.step()
    states = {path: dict(optimizer.state.get(p, {})) for path, p in module.named_parameters()}
    return Plain({path: p.detach() for path, p in module.named_parameters()}, states)


def on_virtual_ranks(ranks: int, body: Callable[[int], None]) -> None:
    def each(rank: Tensor) -> Tensor:
        body(int(rank))
        return rank

    if ranks == 1:
        body(0)
    else:
        fzero.simulate(each, world_size=ranks)(torch.arange(ranks))


def run(engine: Engine, rank: int, row: Sequence[Calls], update: int, way: str = "") -> None:
    """The calls of one update, in a window or not."""
    ways: dict[str, Any] = {"coalesce": engine.coalesce, "no_sync": engine.no_sync}
    if way in ways:
        with ways[way]():
            run(engine, rank, row, update)
        return
    for call, chosen in enumerate(row[rank]):
        if chosen is not None:
            engine.backward(engine(x_of(rank, update, call), chosen))
        if way == "accumulate":
            engine.step()


def close_to(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def stepping(stage: int, body: Callable[[Engine, int], Any], ranks: int = 2) -> None:
    """Run body(engine, rank) with an engine whose update moves whatever it steps."""

    def each(rank: int) -> None:
        module = made()
        body(Engine(module, adamw(module), stage=stage), rank)

    on_virtual_ranks(ranks, each)


def moved(engine: Engine, before: dict[str, Tensor]) -> set[str]:
    """The parts of which a weight has other values than before: ("stem", "head", "0", ...)."""
    after = engine.full_parameters()
    paths = {path for path in before if not torch.equal(before[path], after[path])}
    return {path.split(".")[-2] for path in paths if path.endswith("weight")}


X = torch.ones(1, 3, dtype=torch.float64)
