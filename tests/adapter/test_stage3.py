"""Stage 3 on virtual ranks: the bytes it sends, and how often the ranks ask each other.

How much is whole at once is held in bytes by tests/behaviours/test_live_bytes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.adapter.nets import linear

LAYERS, WIDTH = 4, 12
P_BYTES = LAYERS * WIDTH * WIDTH * 8


def chain(layers: int = LAYERS) -> nn.Sequential:
    """Layers of equal size, each a unit; the batch requires grad, so all are read in backward."""
    torch.manual_seed(3)
    return nn.Sequential(*(linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def on_virtual_ranks(body: Callable[[], Any], ranks: int = 2) -> Any:
    return fzero.simulate(body, world_size=ranks)()


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(fzero.axis_index())
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def step(engine: Engine, backwards: int = 1, *, window: bool = False) -> fzero.CollectiveLog:
    """One update; what it cost."""
    with fzero.count_collectives() as log:
        with engine.coalesce() if window else nullcontext():
            for _ in range(backwards):
                engine(batch()).square().mean().backward()
        engine.step()
    return log


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("reshard", "window", "gathers", "reductions"),
    [
        (True, False, 6, 3),  # of the parameters: twice for each backward
        (False, False, 3, 3),
        ("window", False, 3, 3),
        (True, True, 6, 1),
        (False, True, 3, 1),
        ("window", True, 1, 1),
    ],
)
def test_bytes_on_the_wire_of_three_backwards_are_theory(
    ranks: int, reshard: Any, window: bool, gathers: int, reductions: int
) -> None:
    def body() -> Any:
        engine = Engine(chain(), torch.optim.SGD, stage=3, reshard_after_forward=reshard)
        for _ in range(2):
            log = step(engine, 3, window=window)
        rank, one_way = fzero.axis_index(), P_BYTES * (ranks - 1) // ranks
        assert log.wire_bytes(rank, ops=("all_gather",)) == gathers * one_way
        assert log.wire_bytes(rank, ops=("reduce_scatter",)) == reductions * one_way
        engine.close()

    on_virtual_ranks(body, ranks)


def test_a_steady_step_asks_a_constant_number_of_times() -> None:
    """Three short messages for a backward and one for the update, for 2 units and for 12."""
    for layers in (2, 12):

        def body(layers: int = layers) -> Any:
            engine = Engine(chain(layers), torch.optim.SGD, stage=3)
            for _ in range(3):
                log = step(engine)
            engine.close()
            return torch.tensor(log.counts(fzero.axis_index())["agree"])

        assert on_virtual_ranks(body).tolist() == [4, 4]


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
