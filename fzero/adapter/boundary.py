"""Calls that every rank makes together: the ranks agree on what they hold, and reduce it.

Each rank says which call it makes. If some ranks make another call, or none, all of them raise. A
rank that is still in a backward gets the collectives that it needs until it makes the call, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._gradient import as_held
from fzero.adapter._torch_hooks import in_backward
from fzero.adapter.driver import Driver
from fzero.errors import CallError, PhaseError
from fzero.errors.check import is_number, require
from fzero.machine.offload import change
from fzero.optim import NoOptimizer, require_ordered
from fzero.optim.none import without_optimizer
from fzero.state import TrainState, buffers, progress, scale
from fzero.state.window import CLOSED, open_window
from fzero.transforms.agree import nonfinite, raises_together, reduce_agreed
from fzero.transforms.norm import norm_of_state
from fzero.transforms.points import renewed
from fzero.transforms.prepare import clip_factor, scaled
from fzero.transforms.scaled import scale_forgotten, with_value
from fzero.transforms.weights import averaged


def call_step(driver: Driver, every: int) -> bool:
    """Count a call of `step()`; update at every `every`-th one. Return whether it was due."""
    require_outside(driver, "step()")
    require_no_forward(driver, "step()")
    driver.require_no_window("step()")
    if isinstance(driver.state.setup.optimizer, NoOptimizer):
        raise without_optimizer()
    driver.drop_what_user_dropped()
    counted, due = progress.call_step(driver.state.progress, every)
    if due:
        _step(driver)
    else:
        driver.put(driver.state.replace(progress=counted))
    return due


def require_no_closure(closure: Any) -> None:
    """Raise `CallError` for an argument of `step()`."""
    if closure is not None:
        raise CallError(
            f"engine.step() was given a {type(closure).__name__}.",
            cause="optimizer.step(closure), as torch.optim has it, or a scaler's step(optimizer).",
            fix="call `loss = closure()`, whose backward brings the gradients, then engine.step() "
            "without an argument. LBFGS, which calls its closure several times, is not for ranks.",
        )


def _step(driver: Driver) -> None:
    """Update the parameters from the gradients, and clear those."""
    with raises_together(driver.axis):
        driver.params.require_same()
        if (error := driver.writes.error()) is not None:
            raise error
        driver.stand_ins.require_taken()
        driver.put(with_value(driver.state))
    said = driver.agreed("step()", updates=True)
    with raises_together(driver.axis):
        driver.guard.require_same_groups()
    if said.written:
        driver.writes.compare(driver.running.performer)
    if error := nonfinite([driver.state], None, [said]):
        raise error
    state = reduce_agreed(driver.state, said, used=0)
    driver.put(state)  # if the optimizer raises, this is what the engine has
    if not driver.stand_ins.standing:  # other ranks had a backward
        driver.show_gradients()

    def begin() -> TrainState:
        """After the step pre hooks, which may write to gradients and to parameters."""
        if driver.guard.has_pre_hooks:
            driver.stand_ins.require_none_replaced()
        driver.writes.masters.follow(driver.state)
        return driver.state

    def end(new: TrainState) -> None:
        """Before the step post hooks, which read the new parameters."""
        driver.stand_ins.drop()
        driver.put(new)
        driver.published()

    driver.guard.update(state, said.unused, begin, end)


def clip_grad_norm_(driver: Driver, max_norm: float) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; return it before.

    g <- g min(1, max_norm / (|g| + 1e-6)). A collective. `max_norm=` of the engine does the
    same at every update.
    """
    good = max_norm == float("inf") or (is_number(max_norm) and max_norm >= 0)
    require("clip_grad_norm_(): max_norm", max_norm, lambda _: good, "a number of 0 or more")
    held = driver.reduced(f"clip_grad_norm_({max_norm})")
    state = driver.state
    norm = averaged(state, norm_of_state(state, state.gradients))
    if not held:  # as torch.nn.utils.clip_grad_norm_: nothing to scale
        return norm
    gradients = scaled(state, state.gradients, clip_factor(norm, max_norm))
    driver.put(state.replace(gradients=gradients))
    driver.stand_ins.gradients.changed()
    return norm


@torch.no_grad()
def clip_grad_value_(driver: Driver, clip_value: float) -> None:
    """Bound each element of the reduced gradients: g <- max(-clip_value, min(g, clip_value)).

    What torch.nn.utils.clip_grad_value_ does to the gradients of one process: that works, too.
    """
    good = is_number(clip_value) and clip_value >= 0
    name = "clip_grad_value_(): clip_value"
    require(name, clip_value, lambda _: good, "a number of 0 or more")
    require_ordered("clip_grad_value_()", driver.state.setup.layout.leaves)
    state = driver.with_gradients(f"clip_grad_value_({clip_value})")
    for index, flat in zip(state.setup.layout.trainable, state.gradients.flats, strict=True):
        low, high = (as_held(state, index, bound) for bound in (-clip_value, clip_value))
        change(flat, state.device, partial(Tensor.clamp_, min=low, max=high))
    driver.stand_ins.gradients.changed()


def zero_grad(driver: Driver) -> progress.Progress:
    """Throw away every gradient; return the progress from before. No collective in a window."""
    driver.require_not_closed()
    if not in_backward():
        driver.events.abandon()  # the gradients of a backward that raised are thrown away
        driver.running.put_aside()  # and those that came inside of a forward
    driver.guard.forget_norm()
    if not driver.state.window.is_open:
        driver.call("zero_grad()")
        driver.put(scale_forgotten(driver.state))
    counted = driver.state.progress
    driver.stand_ins.drop()
    driver.clear()
    return counted


# Windows.


@contextmanager
def coalesce(driver: Driver) -> Iterator[None]:
    """Any number of backwards, one reduction, at the end of the block. A collective.

    A block that raises brings nothing, and leaves what was there before.
    """
    with _window(driver, "coalesce()"):
        yield
    said = driver.agreed("the end of coalesce()")
    if said.waits:
        driver.put(reduce_agreed(driver.state, said, used=0))
        driver.show_gradients()


@contextmanager
def no_sync(driver: Driver) -> Iterator[None]:
    """Like `coalesce`, but the reduction is left to the next backward, or to `step`."""
    with _window(driver, "no_sync()"):
        yield


@contextmanager
def _window(driver: Driver, name: str) -> Iterator[None]:
    """Gradients of the block wait, unreduced. One that raises leaves what was there before."""
    require_outside(driver, name)
    driver.require_no_window(name)
    driver.wait()
    opened = open_window(replace(driver.state.window, pending=CLOSED.pending))
    driver.enter_window(renewed(driver.state, "window").replace(window=opened))
    good = False
    try:
        yield
        good = True
    finally:
        driver.wait()
        if good:
            driver.drop_if_user_did()
        now, before = driver.state, driver.leave_window()
        if good:
            waits = before.window.pending
            if now.window.pending.held:  # with what waited before, for one reduction
                waits = buffers.add(waits, now.window.pending)
            shut = replace(now.window, pending=waits, gathered=(), is_open=False)
            driver.put(now.replace(window=shut))
        else:
            driver.put(_without_block(now, before))
        driver.show_gradients()
        driver.running.window_ends()


def _without_block(now: TrainState, before: TrainState) -> TrainState:
    """Return the state without what a block that raised has brought, its weights among it.

    What it took part in that other ranks reduced is every rank's, and stays.
    """
    weighted = before.setup.reduction.weighted
    return now.replace(
        window=before.window,
        progress=before.progress,
        setup=now.setup.with_weights(weighted),
        slots=scale.with_slot(before.slots, now.scale),
    )


# What raises.


def require_outside(driver: Driver, name: str) -> None:
    """Raise `PhaseError` inside a backward."""
    driver.require_not_closed()
    if in_backward():
        raise PhaseError(
            f"{name} inside a backward.",
            cause="a hook on a tensor or parameter called it.",
            fix="call it after loss.backward() has returned.",
        )


def require_no_forward(driver: Driver, name: str) -> None:
    """Raise `PhaseError` inside a forward of the module: its graph would be of other parameters."""
    if driver.events.in_forward:
        raise PhaseError(
            f"{name} inside a forward of the engine's module.",
            cause="a hook on the forward of the module, or of a part of it, called it.",
            fix="note there that it is due, and call it between steps: after engine.step().",
        )
