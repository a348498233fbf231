"""What a newcomer slips on: the error names the function, what was seen, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import CallError, FzeroError, LayoutError
from tests.descends import descends

APPLY, PARAMS = fzero.functionalize(nn.Linear(2, 1))
X, RULE = torch.ones(3, 2), fzero.optim.sgd(0.1)
STATE = fzero.init(PARAMS, RULE, stage=2)
ANY: Any = fzero  # a type checker sees most of these


ENGINE: Any = Engine
ANY_STATE: Any = STATE


def loss_fn(p: Any, x: Any) -> Any:
    return APPLY(p, x).sum()


step_fn = descends(loss_fn)


def swapped(state: Any, x: Any) -> Any:
    return step_fn(state, x)[::-1]


SLIPS: dict[str, tuple[Callable[[], Any], type[FzeroError], str, str]] = {
    **{
        f"{name}: return loss, state": (
            lambda wrap=wrap: wrap(swapped)(STATE, X),
            LayoutError,
            f"{name}: swapped returned \\(Tensor, TrainState\\)",
            "return state, loss",
        )
        for name, wrap in {
            "shard": fzero.shard(stage=2),
            "coalesce": fzero.coalesce,
            "accumulate": fzero.accumulate(steps=3),
            "clip": fzero.clip(max_norm=1.0),
            "autocast": fzero.autocast,
            "check_finite": fzero.check_finite,
        }.items()
    },
    "the batch beside the state": (
        lambda: ANY.grad_and_reduce(loss_fn, STATE, X),
        CallError,
        "grad_and_reduce: too many",
        r"grad_and_reduce\(loss, state\)\(batch\)",
    ),
    "the batch by name": (
        lambda: ANY.grad_and_reduce(loss_fn, STATE, batch=X),
        CallError,
        "grad_and_reduce got .*'batch'",
        r"grad_and_reduce\(loss, state\)\(batch\)",
    ),
    "evaluate with the batch": (
        lambda: ANY.evaluate(APPLY, STATE, X),
        CallError,
        "evaluate: too many",
        r"evaluate\(fn, state\)\(batch\)",
    ),
    "apply(state, x)": (
        lambda: ANY.functionalize(nn.Linear(2, 1))[0](STATE, X),
        LayoutError,
        "apply got a TrainState",
        r"fzero.evaluate\(apply, state\)\(x\)",
    ),
    "apply(x)": (lambda: APPLY(*(X,)),  # type: ignore[arg-type]
        LayoutError, "apply got a Tensor", r"apply\(params, x\)"),
    "a misspelt option of a transform": (
        lambda: ANY.clip(step_fn, maxnorm=1.0),
        CallError,
        "clip got .*'maxnorm'",
        "write max_norm=",
    ),
    "an option by position": (
        lambda: ANY.accumulate(step_fn, 4),
        CallError,
        "accumulate: too many",
        r"accumulate\(step, micro_batches=4\)",
    ),
    "no stage": (
        lambda: ANY.shard(step_fn),
        CallError,
        "shard: missing .*'stage'",
        r"shard\(step, stage=2\)",
    ),
    "no optimizer": (
        lambda: ANY.init(PARAMS, stage=2),
        CallError,
        "init: missing .*'optimizer'",
        r"init\(params, optimizer",
    ),
    "an engine without a stage": (
        lambda: ENGINE(nn.Linear(2, 1), torch.optim.SGD),
        CallError,
        "Engine: missing .*'stage'",
        r"Engine\(module, optimizer, stage=2\)",
    ),
    "the stage of an engine by position": (
        lambda: ENGINE(nn.Linear(2, 1), torch.optim.SGD, 2),
        CallError,
        "Engine: too many",
        r"Engine\(module, optimizer, stage=2\)",
    ),
    **{
        f"init(optimizer, params): {name}": (
            lambda optimizer=optimizer: fzero.init(optimizer, PARAMS, stage=2),
            CallError,
            "init got an optimizer .* in the place of the parameters",
            r"init\(params, optimizer, stage=2\)",
        )
        for name, optimizer in {
            "a rule": RULE,
            "a class": torch.optim.SGD,
            "an instance": torch.optim.SGD([torch.ones(1)]),
            "a pair": (RULE.init, RULE.update),
            "none": fzero.optim.no_optimizer(),
        }.items()
    },
    "state[...]": (
        lambda: STATE["weight"],
        CallError,
        r"state\['weight'\]: a TrainState has no items",
        r"fzero.full_params\(state\)\['weight'\]",
    ),
    **{
        f"{name}(model)": (
            lambda wrap=wrap: wrap(nn.Linear(2, 1)),
            CallError,
            f"{name} got a Linear, an nn.Module",
            r"fzero.adapter.Engine\(model, optimizer, stage=2\)",
        )
        for name, wrap in {
            "shard": ANY.shard,
            "clip": ANY.clip(max_norm=1.0),
            "accumulate": lambda model: fzero.accumulate(model, steps=2),
        }.items()
    },
    "shard(model, stage=2)": (
        lambda: fzero.shard(nn.Linear(2, 1), stage=2),
        CallError,
        "shard got a Linear, an nn.Module",
        r"fzero.functionalize\(model\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_named_with_its_fix(name: str) -> None:
    call, kind, seen, fix = SLIPS[name]
    with pytest.raises(kind, match=f"{seen}[\\s\\S]*Fix: [\\s\\S]*{fix}") as raised:
        call()
    assert len(str(raised.value).splitlines()) == 3


def test_an_error_of_the_users_own_function_is_its_own() -> None:
    with pytest.raises(TypeError, match="takes 1 positional"):
        fzero.grad_and_reduce(lambda p: p, STATE)(X)  # type: ignore[call-arg]


def test_a_state_is_not_iterable_as_before() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        list(ANY_STATE)
