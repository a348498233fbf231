"""The planned peak is the measured one, to the byte, where gradients add up over micro-batches."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from tests.live_bytes import LiveBytes

VOCABULARY, DIM = 57, 16
Step = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.hidden = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.hidden(x).relu())


AROUND: dict[str, Callable[[Step], Any]] = {
    "alone": lambda step: step,
    "accumulate(4)": lambda step: fzero.accumulate(step, steps=4),
    "coalesce(accumulate(2))": lambda step: fzero.coalesce(fzero.accumulate(step, steps=2)),
    "coalesce(accumulate(4))": lambda step: fzero.coalesce(fzero.accumulate(step, steps=4)),
    "accumulate(coalesce, 2)": lambda step: fzero.accumulate(fzero.coalesce(step), steps=2),
}


def made(name: str, stage: int, *, tied: bool) -> tuple[Any, Any]:
    apply, params = fzero.functionalize(Model(tied=tied))

    def loss(p: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(apply(p, tokens).flatten(0, 1), tokens.flatten())

    def step_fn(state: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        state, value = fzero.grad_and_reduce(loss, state)(tokens)
        return fzero.apply_gradients(state), value

    return fzero.shard(AROUND[name](step_fn), stage=stage), params


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", AROUND)
def test_the_planned_peak_is_measured(name: str, stage: int, tied: bool) -> None:
    tokens = torch.arange(4 * 8).view(4, 8) % VOCABULARY
    with LiveBytes() as live:
        step, params = made(name, stage, tied=tied)
        state = step.init(params, fzero.optim.adamw(1e-3))
        del params
        state, value = step(state, tokens)
        live.begin()
        state, value = step(state, tokens)
    assert value.isfinite()
    step, params = made(name, stage, tied=tied)
    plan = fzero.plan.of_step(step, params, fzero.optim.adamw(1e-3), tokens, world=1, device="cpu")
    assert plan.peak_bytes == live.peak


def test_a_call_leaves_no_cycle_that_holds_gradients() -> None:
    """`torch._disable_dynamo` of a function that is made in a call would."""
    step, params = made("coalesce(accumulate(4))", 3, tied=False)
    state = step.init(params, fzero.optim.adamw(1e-3))
    tokens = torch.arange(4 * 8).view(4, 8) % VOCABULARY
    state, _ = step(state, tokens)
    gc.collect()
    gc.disable()
    try:
        state, _ = step(state, tokens)
        fzero.evaluate(lambda p, x: p["embedding.weight"][x], state)(tokens)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [x for x in gc.garbage if isinstance(x, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept


TORCHS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "NAdam": {},
    "Rprop": {},
    "Adagrad": {"weight_decay": 0.1},
}
RULES: dict[str, Callable[[], Any]] = {
    "decay": lambda: fzero.optim.sgd(0.1, weight_decay=0.1),
    "nesterov": lambda: fzero.optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    **{
        name: functools.partial(
            fzero.optim.from_torch, functools.partial(getattr(torch.optim, name), **options)
        )
        for name, options in TORCHS.items()
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_an_update_takes_what_is_planned(rule: str, donate: bool, dtype: torch.dtype) -> None:
    """A loss without activations: the peak is that of the update. A plan has fewer counters."""

    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        state, value = fzero.grad_and_reduce(lambda p, x: p["w"].sum() * x, state)(x)
        return fzero.apply_gradients(state), value

    step, x = fzero.shard(step_fn, stage=0, donate=donate), torch.ones((), dtype=dtype)
    with LiveBytes() as live:
        state = step.init({"w": torch.ones(64, 64, dtype=dtype)}, RULES[rule]())
        state, _ = step(state, x)
        gc.collect()
        live.begin()
        state, _ = step(state, x)
    params = {"w": torch.ones(64, 64, dtype=dtype)}
    plan = fzero.plan.of_step(step, params, RULES[rule](), x, world=1, device="cpu")
    assert plan.peak_bytes == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("around", [fzero.check_finite, fzero.autocast(dtype=torch.bfloat16)])
def test_what_reads_or_gives_away_is_planned(around: Any) -> None:
    """check_finite finds all finite; a donated state has counters with values beside the rest."""
    made, params = made_of(around)
    adamw = fzero.optim.from_torch(torch.optim.AdamW)
    plan = fzero.plan.of_step(made, params, adamw, torch.ones(8), world=2)
    assert plan.bytes["optimizer"] >= 2 * plan.bytes["parameters"]


def made_of(around: Any) -> tuple[Any, Any]:
    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        state, value = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        return fzero.apply_gradients(state), value

    return fzero.shard(around(step_fn), stage=3, donate=True), {"w": torch.ones(8)}


def test_an_optimizer_that_reads_is_named_as_a_cause() -> None:
    step, params = made_of(lambda step: step)
    with pytest.raises(fzero.PhaseError, match=r"an optimizer that reads .* as Adafactor"):
        fzero.plan.of_step(step, params, fzero.optim.adafactor(0.1), torch.ones(8), world=1)
