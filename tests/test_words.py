"""Slips that a beginner makes are answered by what to write, and not by Python's own words."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.ranks.virtual import run_ranks


def loss_fn(p: Any, x: Tensor) -> Tensor:
    return (p["w"] * x).sum()


def step_fn(state: Any, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
    return fzero.apply_gradients(state), loss


def state_of() -> Any:
    return fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=1)


def called(step: Any) -> Any:
    sharded = fzero.shard(step, stage=1)
    return sharded(sharded.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1)), torch.ones(4))


def ends(with_: Callable[[Any, Any], Any]) -> Callable[[Any, Tensor], Any]:
    return lambda state, x: with_(*step_fn(state, x))


def backwards(state: Any, x: Tensor) -> Any:
    state, loss = step_fn(state, x)
    loss.backward()
    return state, loss


async def awaited(state: Any, x: Tensor) -> Any:
    return step_fn(state, x)


def yields(state: Any, x: Tensor) -> Any:
    yield step_fn(state, x)


def assigns(state: Any) -> None:
    state.step = 5


def unpacked() -> Any:
    made: Any = fzero.grad_and_reduce(loss_fn, state_of())
    state, loss = made
    return state, loss


@dataclasses.dataclass
class Params:
    w: Tensor


def engine_of(stage: int = 2) -> Any:
    module = nn.Linear(2, 2)
    return Engine(module, torch.optim.SGD(module.parameters()), stage=stage)


def scripted(model: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        torch.jit.script(model)


def traced(model: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.trace(model, torch.ones(1, 2))


LATER: Any = fzero
SLIPS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no call": (unpacked, TypeError, r"without the call.*\(loss_fn, state\)\(batch\)"),
    "backward": (lambda: called(backwards), RuntimeError, "leave it out.*grad_and_reduce"),
    "params[]": (lambda: state_of().params["w"], TypeError, r"full_params\(state\)\['w'\]"),
    "params.items": (lambda: state_of().params.items(), AttributeError, "full_params"),
    "state_dict": (lambda: state_of().state_dict(), AttributeError, "checkpoint.save"),
    "to": (lambda: state_of().to("cpu"), AttributeError, r"step.init\(params, optimizer\)"),
    "assign": (lambda: assigns(state_of()), AttributeError, r"state.replace\(step=...\)"),
    "Engine": (lambda: LATER.Engine, AttributeError, "from fzero.adapter import Engine"),
    "near": (lambda: LATER.grad_and_reduc, AttributeError, "write fzero.grad_and_reduce"),
    "AdamW": (lambda: LATER.optim.AdamW, AttributeError, "write fzero.optim.adamw"),
    "NAdam": (lambda: LATER.optim.NAdam, AttributeError, r"from_torch\(torch.optim.NAdam\)"),
    "wd": (lambda: LATER.optim.adamw(0.1, wd=0.1), TypeError, "write weight_decay="),
    "muon": (lambda: LATER.optim.muon(0.1, mom=0.1), TypeError, "write momentum="),
    "3-tuple": (lambda: called(ends(lambda s, v: (s, v, v))), ValueError, r"state, \(loss, acc"),
    "coroutine": (lambda: called(awaited), ValueError, "an async function"),
    "generator": (lambda: called(yields), ValueError, "`yield`"),
    "partial": (
        lambda: called(ends(lambda s, v: functools.partial(step_fn, s))),
        ValueError,
        "was not called",
    ),
    "functionalize": (
        lambda: fzero.init(fzero.functionalize(nn.Linear(2, 2)), fzero.optim.sgd(0.1), stage=1),
        TypeError,
        "apply, params = fzero.functionalize",
    ),
    "dataclass": (
        lambda: fzero.init(Params(torch.ones(2)), fzero.optim.sgd(0.1), stage=1),
        ValueError,
        "optree.dataclasses.dataclass",
    ),
    "join": (lambda: engine_of().join(), AttributeError, "weight=0"),
    "comm_hook": (lambda: engine_of().register_comm_hook(), AttributeError, "compress="),
    "jit.script": (lambda: scripted(engine_of().module), AttributeError, r"engine.close\(\) first"),
    "jit.script of an engine": (lambda: scripted(engine_of()), RuntimeError, r"close\(\) first"),
    "jit.trace of an engine": (lambda: traced(engine_of()), RuntimeError, r"close\(\) first"),
    "jit.trace": (
        lambda: run_ranks(lambda _: traced(engine_of(3).module), 2),
        RuntimeError,
        r"close\(\) first",
    ),
    "export": (
        lambda: torch.export.export(engine_of().module, (torch.ones(1, 2),)),
        ValueError,
        r"engine.close\(\) comes first",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_answered_by_what_to_write(slip: str) -> None:
    run, kind, words = SLIPS[slip]
    with pytest.raises(kind, match=f"(?s){words}"):
        run()


def test_what_asks_for_a_name_hears_that_it_is_not_there() -> None:
    state = state_of()
    for thing in (state, state.params, fzero, fzero.optim):
        assert not hasattr(thing, "state_dict")
