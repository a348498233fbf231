"""Looking into an engine of stage 3 while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fzero.adapter._source import Source
from fzero.state.coordinator_effects import Effect
from fzero.state.coordinator_record import CoordinatorState
from torch import Tensor, nn

from fzero.adapter import Engine
from tests.adapter.nets import linear

WIDE = 4
LAYER_NUMEL = WIDE * WIDE + WIDE  # divides by 2; over 3 ranks it is padded to 21


class Look(torch.autograd.Function):
    """The identity, that calls `look` in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Any) -> Tensor:
        ctx.look = look
        look()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradient, None


class Chain(nn.Module):
    """Four layers, one unit each, in the order that `order` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(WIDE, WIDE) for _ in range(4)])
        self.order = [0, 1, 2, 3]
        self.look: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = Look.apply(torch.tanh(self.layers[at](x)), self.look)
        return x


def source_of(engine: Engine) -> Source:
    source = engine._parts.source
    assert source is not None
    return source


def record_of(engine: Engine) -> CoordinatorState:
    record = engine.state.coordinator
    assert record is not None
    return record


def effects_of(engine: Engine) -> list[Effect]:
    """From here on, every effect that the coordinator asks for, in order."""
    source, found = source_of(engine), []
    run = source._run

    def spy(effect: Effect) -> None:
        found.append(effect)
        run(effect)

    source._run = spy
    return found


def live_numels(engine: Engine) -> list[int]:
    """From here on, the elements that are held after each layer, forward and backward."""
    source, found = source_of(engine), []

    def look() -> None:
        held = sum(flat.numel() for flat in source.flats)
        flying = sum(source.state.units.numels[u] for u in source.state.in_flight)
        assert source.state.residency.live_numel == held + flying
        found.append(held + flying)

    chain: Any = engine.module
    chain.look = look
    return found


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings of the block, every one of them."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]
