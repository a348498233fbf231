"""Random programs for an engine, and a naive model of what they must give.

    draw_program(seed)      a list of events, the same for the same seed
    run_program(...)        runs it on this rank's engine and on the model, and compares

The model keeps, for every backward that counts, the mean over ranks of its gradients, in a list;
a window is a second list. It knows nothing of hooks, buckets, stages or collectives.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fzero.adapter import Engine
from fzero.errors import PhaseError
from tests.adapter.nets import Net, TiledLoss, faulty, linear
from tests.adapter.plain import (
    Draw,
    Gradients,
    Plain,
    Reference,
    engine_of,
    gradients_of,
    is_idle,
    mean,
    same,
)
from tests.failing import fails_in_backward

FORWARDS = ("net", "net", "tiled", "choice", "reentrant", "checkpoint", "submodule", "penalty")
STYLES = ("loss", "engine", "retain", "all at once")
EVENTS = {
    "forward": 7,
    "backward": 8,
    "open": 3,
    "close": 3,
    "zero_grad": 2,
    "step": 2,
    "raise in backward": 2,
    "raise in forward": 1,
    "raise in window": 1,
    "evaluate": 1,
    "full_gradients": 1,
}


class Event(NamedTuple):
    what: str
    how: str = ""
    which: int = 0


class Program(NamedTuple):
    seed: int
    options: dict[str, Any]
    events: list[Event]


def draw_program(seed: int) -> Program:
    """At most 12 events. Those that are not legal where they come must be refused."""
    source = random.Random(seed)
    names, weights = list(EVENTS), list(EVENTS.values())
    events = []
    for what in source.choices(names, weights, k=source.randint(3, 12)):
        how = {"forward": FORWARDS, "backward": STYLES, "open": ("coalesce", "no_sync")}
        chosen = source.choice(how.get(what, ("loss", "engine")))
        events.append(Event(what, chosen, source.randrange(3)))
    options = {
        "bucket_bytes": source.choice((8, 100, 2**20)),
        "contiguous_gradients": source.random() < 0.5,
        "overlap": source.random() < 0.7,
    }
    return Program(seed, options, events)


class Toy(Net):
    """One module, several ways to run it; `d` is used by ranks of even number only."""

    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.d = linear(3, 3)

    def forward(self, x: Tensor, how: str, rank: int) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.fault == "forward":
            raise ValueError("raised in forward")
        if self.fault == "middle":
            h = fails_in_backward(h, ValueError("raised in backward"))
        if how in ("reentrant", "checkpoint"):
            h = checkpoint(self._middle, h, use_reentrant=how == "reentrant")
            return self.c(h) + self.b.bias.sum()
        h = self._middle(h)
        if how == "tiled":
            return TiledLoss.apply(h, self.c)
        return self.c(h) + (self.d(h) if how == "choice" and rank % 2 == 0 else 0.0)

    def _middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.b(h))


def loss_of(e: Any, how: str, draw: Draw) -> Tensor:
    x = draw(3, 3)
    if how == "submodule":
        return e.module.a(x).square().sum()
    if how == "penalty":
        x.requires_grad_()
        (g,) = torch.autograd.grad(e(x, how, draw.rank).sum(), x, create_graph=True)
        return g.square().sum()
    return e(x, how, draw.rank).square().sum()


class Model:
    """What an engine must hold: lists of mean gradients, and nothing else."""

    def __init__(self, world_size: int) -> None:
        self.plain = Reference(Toy, world_size)
        self.held: list[Gradients] = []
        self.window: list[Gradients] | None = None

    def forward(self, how: str, number: int) -> Gradients:
        """The gradients that a backward of this loss will bring, once or more often.

        A tiled loss brings some of its gradients in its forward.
        """
        module, in_forward, in_backward = self.plain.module, [], []
        for rank in range(self.plain.world_size):
            module.zero_grad()
            loss = loss_of(Plain(module), how, Draw(rank, number))
            in_forward.append(gradients_of(module))
            module.zero_grad()
            loss.backward()
            in_backward.append(gradients_of(module))
        if how == "tiled":
            self.add(mean(in_forward))
        return mean(in_backward)

    def add(self, gradients: Gradients) -> None:
        (self.held if self.window is None else self.window).append(gradients)

    def open(self) -> None:
        self.window = []

    def close(self, *, good: bool) -> None:
        self.held += self.window if good and self.window else []
        self.window = None

    def clear(self) -> None:
        self.held = []
        self.window = None if self.window is None else []

    @property
    def total(self) -> Gradients:
        return {path: sum(g[path] for g in self.held) for path in self.held[0]}  # type: ignore[misc]


class Live(NamedTuple):
    loss: Tensor
    brings: Gradients


class Runner:
    """One engine and its model, event by event."""

    def __init__(self, rank: int, world_size: int, stage: int, program: Program) -> None:
        self.rank, self.program = rank, program
        self.model = Model(world_size)
        self.engine: Engine = engine_of(Toy, stage, **program.options)
        self.live: list[Live] = []
        self.context: AbstractContextManager[None] | None = None

    def run(self) -> None:
        for number, event in enumerate(self.program.events):
            getattr(self, "do_" + event.what.replace(" ", "_"))(event, number)
        self.do_close(Event("close"), -1)
        self.do_full_gradients(Event("full_gradients"), -1)
        assert is_idle(self.engine)
        assert not self.engine.state.window.is_open
        self.do_step(Event("step"), -1)
        self.engine.close()

    def do_forward(self, event: Event, number: int) -> None:
        brings = self.model.forward(event.how, number)
        loss = loss_of(self.engine, event.how, Draw(self.rank, number))
        self.live = [*self.live[-2:], Live(loss, brings)]

    def do_backward(self, event: Event, number: int) -> None:
        if not self.live:
            return
        at = event.which % len(self.live)
        if event.how == "all at once":
            torch.autograd.backward([live.loss for live in self.live])
            for live in self.live:
                self.model.add(live.brings)
            self.live = []
            return
        loss, brings = self.live[at]
        if event.how == "engine":
            self.engine.backward(loss)
        else:
            loss.backward(retain_graph=event.how == "retain")
        self.model.add(brings)
        if event.how != "retain":
            del self.live[at]

    def do_open(self, event: Event, number: int) -> None:
        context = getattr(self.engine, event.how)()
        if self.context is not None:
            with pytest.raises(PhaseError, match="inside"):
                context.__enter__()
            return
        context.__enter__()
        self.context = context
        self.model.open()

    def do_close(self, event: Event, number: int) -> None:
        if self.context is not None:
            context, self.context = self.context, None
            context.__exit__(None, None, None)
            self.model.close(good=True)

    def do_zero_grad(self, event: Event, number: int) -> None:
        self.engine.zero_grad()
        self.model.clear()

    def do_step(self, event: Event, number: int) -> None:
        if self.context is not None:
            with pytest.raises(PhaseError, match=r"step\(\)"):
                self.engine.step()
            return
        self.do_full_gradients(event, number)
        assert self.engine.step() is True
        if not self.model.held:  # an update of nothing
            self.live = []
            same(self.engine.full_parameters(), self.model.plain.parameters(), 1e-9, "nothing")
            return
        wanted = self.model.plain.step(self.model.total)
        self.model.clear()
        self.live = []  # their graphs have the parameters of before
        same(self.engine.full_parameters(), wanted, 1e-9, "updated")

    def do_raise_in_backward(self, event: Event, number: int) -> None:
        with faulty(self.engine, "middle"):
            loss = loss_of(self.engine, "net", Draw(self.rank, number))
        with pytest.raises(ValueError, match="raised in backward"):
            loss.backward() if event.how == "loss" else self.engine.backward(loss)

    def do_raise_in_forward(self, event: Event, number: int) -> None:
        with (
            pytest.raises(ValueError, match="raised in forward"),
            faulty(self.engine, "forward"),
        ):
            loss_of(self.engine, "net", Draw(self.rank, number))

    def do_raise_in_window(self, event: Event, number: int) -> None:
        if self.context is None:
            return
        context, self.context = self.context, None
        error = KeyError("in the window")
        assert not context.__exit__(KeyError, error, None)
        self.model.close(good=False)

    def do_evaluate(self, event: Event, number: int) -> None:
        with torch.no_grad():
            self.engine(Draw(self.rank, number)(2, 3), "net", self.rank)

    def do_full_gradients(self, event: Event, number: int) -> None:
        if self.context is not None or not self.model.held:
            with pytest.raises(PhaseError, match=r"full_gradients\(\)"):
                self.engine.full_gradients()
            return
        same(self.engine.full_gradients(), self.model.total, 1e-9, "gradients")


def run_programs(rank: int, world_size: int, stage: int, seeds: Sequence[int]) -> int:
    """Run the programs of these seeds; what fails says which, and with which events."""
    for seed in seeds:
        program = draw_program(seed)
        try:
            with warnings.catch_warnings():  # of windows that raised
                warnings.filterwarnings("ignore", "KeyError left a .* block")
                Runner(rank, world_size, stage, program).run()
        except BaseException as error:
            events = "\n".join(map(str, program.events))
            raise AssertionError(
                f"seed {seed}, stage {stage}, {program.options}: {error!r}\n{events}"
            ) from error
    return len(seeds)
