"""Stage 3 under an engine: what is gathered when, for how long, and what ranks say about it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine

LAYERS, WIDTH = 4, 12
P_BYTES = LAYERS * WIDTH * WIDTH * 8


def chain() -> nn.Sequential:
    """Layers of equal size, each a unit; the batch requires grad, so all are read in backward."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def on_ranks(body: Callable[[], Any], ranks: int = 2) -> Any:
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
@pytest.mark.parametrize("reshard", [True, False, "window"])
@pytest.mark.parametrize("window", [False, True])
def test_bytes_on_the_wire_are_theory(ranks: int, reshard: Any, window: bool) -> None:
    """Twice P for each backward, once if it stays, once for the window; P in each reduction."""
    backwards = 3

    def body() -> Any:
        engine = Engine(chain(), torch.optim.SGD, stage=3, reshard_after_forward=reshard)
        for _ in range(2):
            log = step(engine, backwards, window=window)
        rank = fzero.axis_index()
        one_way = P_BYTES * (ranks - 1) // ranks
        gathers = {True: 2 * backwards, False: backwards}.get(reshard, backwards)
        gathers = 1 if reshard == "window" and window else gathers
        assert log.wire_bytes(rank, ops=("all_gather",)) == gathers * one_way
        reductions = 1 if window else backwards
        assert log.wire_bytes(rank, ops=("reduce_scatter",)) == reductions * one_way
        engine.close()

    on_ranks(body, ranks)


def test_a_steady_step_asks_a_constant_number_of_times() -> None:
    """Three short messages for a backward and one for the update, for 2 units and for 12."""

    def rounds(layers: int) -> Callable[[], Any]:
        def body() -> Any:
            parts = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers)]
            engine = Engine(nn.Sequential(*parts), torch.optim.SGD, stage=3)
            for _ in range(3):
                log = step(engine)
            engine.close()
            return torch.tensor(log.counts(fzero.axis_index())["agree"])

        return body

    assert on_ranks(rounds(2)).tolist() == on_ranks(rounds(12)).tolist() == [4, 4]


def test_at_most_two_units_are_whole_at_once() -> None:
    def body() -> Any:
        engine = Engine(chain(), torch.optim.SGD, stage=3)
        seen: list[int] = []
        for layer in engine.module.children():
            layer.register_forward_hook(
                lambda *_: seen.append(sum(engine.memory_report().live_parameters.values()))
            )
        for _ in range(2):
            step(engine)
        engine.close()
        assert 0 < max(seen[LAYERS:]) <= 2 * P_BYTES // LAYERS
        return torch.zeros(())

    on_ranks(body)


def test_the_schedule_is_in_the_state_and_the_same_on_every_rank() -> None:
    def body() -> Any:
        engine = Engine(chain(), torch.optim.SGD, stage=3)
        assert engine.state.schedule == fzero.state.Schedule()
        step(engine)
        found = engine.state.schedule
        step(engine)
        assert engine.state.schedule == found
        engine.close()
        return repr(found)

    assert "Program(events=(0, 1, 2, 3))" in on_ranks(body)
