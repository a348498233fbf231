"""The hook machine on torch's own autograd engine: what it is told there, and what it says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from fzero.state import hooks
from fzero.state.effects import DropBackward, HookEffects, QueueCallback, RunEpilogue
from fzero.state.hooks import HookState

BOTH = pytest.mark.parametrize("callbacks", [True, False], ids=["callback", "counting"])


class Driver:
    """The smallest adapter: autograd's events on `module` become transitions of one record.

    `said` has one letter for each thing that happened: h a hook, c a count of the hooks to come,
    E an epilogue, D a dropped backward.
    """

    def __init__(self, module: Callable[[Tensor], Tensor], *, callbacks: bool) -> None:
        self.module, self.callbacks = module, callbacks
        self.state, self.said = HookState(), ""
        self.weights = list(module.parameters()) if isinstance(module, nn.Module) else []
        self.nodes = [get_gradient_edge(weight).node for weight in self.weights]
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self._hook)

    def __call__(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1:  # else it is a recomputation
            self._happens(hooks.reset_for_new_step(self.state))
        out = self.module(x)
        out.register_hook(self._enter)
        return out

    @property
    def _task(self) -> int | None:
        return torch._C._current_graph_task_id() if self.callbacks else None

    def _happens(self, answer: tuple[HookState, HookEffects]) -> None:
        self.state, effects = answer
        for effect in effects:
            if isinstance(effect, QueueCallback):
                self._queue(effect.graph_task_id)
            self.said += {RunEpilogue: "E", DropBackward: "D"}.get(type(effect), "")
            while effect == RunEpilogue() and self.state.backward_active_depth:
                self._happens(hooks.exit_backward(self.state))

    def _queue(self, task: int) -> None:
        def end() -> None:
            self._happens(hooks.graph_completed(self.state, graph_task_id=task))

        # A graph task that raises frees its callbacks without a call: that is how it is noticed.
        weakref.finalize(end, self._ended, task)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _ended(self, task: int) -> None:
        if self.state.post_backward_callback_graph_task_id == task:
            self._happens(hooks.reset_for_new_step(self.state))

    def _enter(self, _: Tensor) -> None:
        self._happens(hooks.enter_backward(self.state))
        self._happens(hooks.queue_post_backward_callback(self.state, graph_task_id=self._task))

    def _hook(self, _: Tensor) -> None:
        expected = self.state.max_expected_hooks_seen
        if hooks.should_refresh_expected_hook_count(self.state):
            self.said += "c"
            here = sum(map(torch._C._will_engine_execute_node, self.nodes))
            expected = self.state.hooks_fired_this_backward + here
        self._happens(hooks.reenter_backward_if_needed(self.state))
        self.said += "h"
        answer = hooks.update_hook_state_and_maybe_run_epilogue(
            self.state, expected=expected, graph_task_id=self._task
        )
        self._happens(answer)


class Blocks(nn.Module):
    """Two blocks of two weights, checkpointed or not, and a head of two: six hooks."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).sum()


def data() -> Tensor:
    return torch.ones(2, 3, requires_grad=True)


@BOTH
@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "non-reentrant"])
def test_one_graph_task_is_one_backward(callbacks: bool, reentrant: bool | None) -> None:
    driver = Driver(Blocks(reentrant), callbacks=callbacks)
    for _ in range(2):
        driver(data()).backward()
    assert driver.said == "chhhhhhE" * 2
    assert driver.state.backward_active_depth == 0


def test_reentrant_phases_wait_for_the_outermost_graph() -> None:
    driver = Driver(Blocks(reentrant=True), callbacks=True)
    driver(data()).backward()
    assert driver.said == "chhhhhhE"


def test_reentrant_phases_by_count_are_re_entered_and_counted_once_each() -> None:
    driver = Driver(Blocks(reentrant=True), callbacks=False)
    driver(data()).backward()
    assert driver.said == "chhE" * 3
    assert driver.state.hooks_fired_this_backward == 6


@BOTH
def test_several_backwards_through_one_forward(callbacks: bool) -> None:
    driver = Driver(Blocks(), callbacks=callbacks)
    loss = driver(data())
    loss.backward(retain_graph=True)
    loss.backward()
    assert driver.said == "chhhhhhE" * 2


@BOTH
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["fifo", "lifo"])
def test_two_forwards_then_two_backwards(callbacks: bool, order: tuple[int, int]) -> None:
    driver = Driver(Blocks(), callbacks=callbacks)
    losses = [driver(data()) for _ in range(2)]
    for i in order:
        losses[i].backward()
    assert driver.said == "chhhhhhE" * 2
    assert driver.state.backward_active_depth == 0


@BOTH
def test_two_forwards_under_one_backward(callbacks: bool) -> None:
    driver = Driver(Blocks(), callbacks=callbacks)
    for _ in range(2):
        torch.autograd.backward([driver(data()), driver(data())])
    assert driver.said == "chhhhhhE" * 2
    assert driver.state.backward_active_depth == 0


class Tiled(torch.autograd.Function):
    """The loss of each row, its backward run in the forward: weights get gradients there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: nn.Module) -> Tensor:
        rows = x.detach().requires_grad_()
        with torch.enable_grad():
            losses = [head(row).sum() for row in rows]
            for loss in losses:
                loss.backward()
        ctx.save_for_backward(rows.grad)
        return torch.stack(losses).sum().detach()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        return dy[0] * ctx.saved_tensors[0], None


class TiledLoss(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return Tiled.apply(self.blocks[1](self.blocks[0](x)), self.head)


@BOTH
def test_a_backward_inside_a_forward_is_not_the_users(callbacks: bool) -> None:
    driver = Driver(TiledLoss(), callbacks=callbacks)
    for step in range(2):
        loss = driver(data())
        assert driver.said == "chhhh" + "chhhhEchhhh" * step
        assert driver.state.hooks_fired_this_backward == 0
        assert driver.state.hooks_outside_backward == 4
        loss.backward()
    assert driver.said == "chhhhchhhhE" * 2


class NoGradient(torch.autograd.Function):
    """x, with a weight that gets an undefined gradient: None in its hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        return dy[0], None


class Undefined(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(self.blocks[0](x), self.head.weight).sum()


@BOTH
def test_an_undefined_gradient_is_counted_and_fires(callbacks: bool) -> None:
    driver = Driver(Undefined(), callbacks=callbacks)
    driver(data()).backward()
    assert driver.said == "chhhE"
    assert [weight.grad is None for weight in driver.weights] == [False] * 2 + [True] * 4


@BOTH
def test_a_backward_to_some_of_the_weights(callbacks: bool) -> None:
    driver = Driver(Blocks(), callbacks=callbacks)
    driver(data()).backward(inputs=driver.weights[1:3])
    assert driver.said == "chhE"


def test_gradients_of_inputs_only_fire_no_hook_and_end_the_graph() -> None:
    driver, x = Driver(Blocks(), callbacks=True), data()
    (slope,) = torch.autograd.grad(driver(x), x, create_graph=True)
    assert (driver.said, driver.state.hooks_fired_this_backward) == ("E", 0)
    slope.square().sum().backward()  # no output of the driver's got a gradient: nobody entered
    assert driver.said.strip("c") == "Echhh"
    assert driver.state.hooks_outside_backward == 3


@BOTH
def test_several_engines_under_one_loss(callbacks: bool) -> None:
    one, two = (Driver(Blocks(), callbacks=callbacks) for _ in range(2))
    for _ in range(2):
        (one(data()) * two(data()) + one(data())).backward()
    assert one.said == two.said == "chhhhhhE" * 2
    assert one.state.backward_active_depth == two.state.backward_active_depth == 0


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_backward_that_raises_is_noticed_and_dropped(reentrant: bool | None) -> None:
    driver = Driver(Blocks(reentrant), callbacks=True)
    bad = driver.weights[0].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver(data()).backward()
    assert driver.said.strip("ch") == "D"
    assert driver.state == HookState()
    bad.remove()
    driver.said = ""
    driver(data()).backward()
    assert driver.said == "chhhhhhE"
