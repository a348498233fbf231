"""An engine with a dynamic scale trains as a module with torch.amp.GradScaler does, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from fzero.adapter import DynamicScale, Engine
from tests.strategies import stages

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused adamw": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, fused=False),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5, dampening=0.25, fused=False),
}
INFINITE = [float("inf"), float("-inf"), float("nan")]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class AsGradScaler(RuleBasedStateMachine):
    """Any number of backwards, finite or not, and updates; `clip` unscales first, as torch asks."""

    @initialize(
        stage=stages,
        optimizer=st.sampled_from([*OPTIMIZERS]),
        interval=st.integers(1, 3),
        power=st.integers(-3, 18),
        clip=st.booleans(),
    )
    def start(self, stage: int, optimizer: str, interval: int, power: int, clip: bool) -> None:
        self.plain, self.held, self.seed = net(), 0, 0
        self.max_norm = 0.125 if clip else None
        self.optimizer = OPTIMIZERS[optimizer](self.plain.parameters())
        self.scaler: Any = torch.amp.GradScaler(
            "cpu", init_scale=2.0**power, growth_interval=interval
        )
        self.scaler.scale(torch.zeros(()))  # which makes its tensors
        self.engine = Engine(
            net(),
            OPTIMIZERS[optimizer],
            stage=stage,
            max_norm=self.max_norm,
            loss_scale=DynamicScale(init_scale=2.0**power, growth_interval=interval),
        )

    @rule(bad=st.none() | st.none() | st.sampled_from(INFINITE))
    def backward(self, bad: float | None) -> None:
        self.seed, self.held = self.seed + 1, self.held + 1
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(self.seed))
        if bad is not None:
            x[0, 1] = bad
        self.scaler.scale(self.plain(x).square().mean()).backward()
        self.engine.backward(self.engine(x).square().mean())

    @precondition(lambda self: self.held)
    @rule()
    def step(self) -> None:
        self.held = 0
        before = self.scaler.get_scale()
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        assert self.engine.step() is True
        assert self.engine.step_was_skipped is (self.scaler.get_scale() < before)

    @invariant()
    def agrees(self) -> None:
        held = self.engine.state.scale
        assert held is not None
        assert torch.equal(held.scale, self.scaler._scale)
        assert torch.equal(held.good_updates, self.scaler._growth_tracker)
        found = self.engine.full_parameters()
        for path, p in self.plain.named_parameters():
            if self.max_norm is None:
                assert torch.equal(found[path], p), path
            else:  # torch adds the squares in another order
                torch.testing.assert_close(found[path], p.detach(), rtol=1e-5, atol=1e-6)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


TestAsGradScaler = AsGradScaler.TestCase
TestAsGradScaler.settings = settings(max_examples=25, stateful_step_count=25)
