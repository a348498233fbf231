"""Both drivers send the same events to the protocol: which call of each is which event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.collectives import Performer
from fzero.state.protocol import ProtocolEvent

TABLE = {
    # event          what a functional step does           what an engine's user does
    "Join": ("grad_and_reduce(loss, state)(batch)", "Engine(module, ...)"),
    "Begin": ("the loss begins; its backward begins", "engine(x); loss.backward()"),
    "FirstGradient": ("", "the first gradient below stage 3"),
    "Use": ("a kernel reads a leaf", "a kernel reads a parameter"),
    "Ready": ("a bucket has all its gradients", "a bucket has all its gradients"),
    "SyncPoint": ("fzero.psum in the loss", "fzero.psum in the forward"),
    "Met": ("fzero.psum in the loss, on processes", "fzero.psum in the forward, on processes"),
    "EndForward": ("the loss returns", "the module returns"),
    "Finish": (
        "the backward, or fzero.evaluate, is over",
        "the graph task, or engine(x) under no_grad, is over",
    ),
    "Failed": ("the loss raises", "a forward or a backward raises"),
    "GiveUp": ("the loss raises", "a forward or a backward raises"),
    "Raised": ("an error just before a round", "an error just before a round"),
    "Leave": ("grad_and_reduce returns", "engine.close()"),
    "Call": ("apply_gradients(state)", "engine.step()"),
    "Pin": ("", "with gathered(params):"),
    "Unpin": ("", "the end of the block, or of `with engine.coalesce():`"),
    "Changed": ("", "the update, or a write"),
    "Noted": ("fzero.map_params(...)", "fzero.add_gradients(engine.state, ...) in a window"),
}
"""Not in it: what comes from the performer itself (`Answer`, `Broke`)."""

LIFE = {"Join", "Leave", "Changed"}
"""Of a pass: a functional one lives for a call, that of an engine as long as the engine."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the events of rank 0."""
    seen: list[str] = []
    send = Performer.send

    def noted(self: Performer, event: ProtocolEvent) -> None:
        if fzero.axis_index() == 0:
            seen.append(type(event).__name__)
        send(self, event)

    monkeypatch.setattr(Performer, "send", noted)
    return seen


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


X = torch.ones(3, 2)


def functional(log: list[str], stage: int, *, fails: bool = False) -> list[str]:
    apply, params = fzero.functionalize(net())

    def loss(p: Any, x: Any) -> Any:
        value = apply(p, x).sum()
        return 1 / 0 if fails else value

    @fzero.shard(stage=stage)
    def step(state: Any, x: Any) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    def body() -> None:
        state = step.init(params, fzero.optim.sgd(0.1))
        for _ in range(1 if fails else 2):
            if fzero.axis_index() == 0:
                log.clear()
            state, _ = step(state, X)

    run(body, fails)
    return [*log]


def engine(log: list[str], stage: int, *, fails: bool = False) -> list[str]:
    def body() -> None:
        module = net()
        one = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=stage)
        for _ in range(1 if fails else 2):
            if fzero.axis_index() == 0:
                log.clear()
            out = one(X).sum()
            if fails:
                out.register_hook(lambda g: 1 / 0)
            one.backward(out)
            one.step()

    run(body, fails)
    return [*log]


def run(body: Any, fails: bool) -> None:
    run_all = fzero.simulate(body, world_size=2)
    if fails:
        with pytest.raises(Exception, match="division by zero"):
            run_all()
    else:
        run_all()


@pytest.mark.parametrize("stage", range(4))
def test_a_step_is_the_same_events_in_both(stage: int, log: list[str]) -> None:
    both = functional(log, stage), engine(log, stage)
    assert all({*events} <= {*TABLE} for events in both)
    shared = [[event for event in one if event not in LIFE] for one in both]
    shared[1] = [event for event in shared[1] if event != "FirstGradient"]
    assert shared[0] == shared[1]
    reads = ["Use", "Use"] if stage == 3 else []
    back = ["Use", "Ready", "Ready"] if stage == 3 else ["Ready"]
    forward = ["Begin", *reads, "EndForward"]
    assert shared[0] == [*forward, "Begin", *back, "Finish", "Call"]


@pytest.mark.parametrize("driver", [functional, engine])
def test_what_raises_is_given_up_in_both(driver: Any, log: list[str]) -> None:
    events = [event for event in driver(log, 3, fails=True) if event != "Leave"]
    assert events[-2:] == ["Failed", "GiveUp"]


def test_the_table_has_every_event_of_a_driver() -> None:
    every = {one.__name__ for one in ProtocolEvent.__subclasses__()}
    assert {*TABLE} == every - {"Answer", "Broke"}
