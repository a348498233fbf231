"""Calls that every rank makes together: the ranks agree on what they hold, and reduce it.

Each rank says which call it makes. If some ranks make another call, or none, all of them raise. A
rank that is still in a backward gets the collectives that it needs until it makes the call, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fzero.adapter._events import in_backward
from fzero.adapter._gradient import as_held
from fzero.adapter.driver import Driver
from fzero.errors import PhaseError
from fzero.errors.check import is_number, require
from fzero.machine.offload import change
from fzero.optim import NoOptimizer, require_ordered
from fzero.optim.none import without_optimizer
from fzero.state import TrainState, buffers, progress, scale
from fzero.state.window import CLOSED, open_window
from fzero.transforms.agree import Agreed, agree, nonfinite, raises_together, reduce_agreed
from fzero.transforms.norm import clip_factor, norm_of_state
from fzero.transforms.scaled import with_value
from fzero.transforms.update import scaled, share, update


def call(driver: Driver, name: str, value: int = 0, more: str = "") -> frozenset[int]:
    """Wait until every rank makes this call; return the values that they give, each once.

    `more`: what must be the same on every rank besides.
    """
    driver.require_not_closed()
    said = f"{name} of engine {driver.number}{more}"
    values = driver.running.performer.call(said, value)
    driver.running.take_served()
    return values


def with_gradients(driver: Driver, name: str, path: str = "") -> TrainState:
    """Reduce what waits on any rank; return the state, which holds all gradients then.

    `path`: of the parameter that the call is about.

    Raises `PhaseError` if no rank holds any.
    """
    if not reduced(driver, name, path):
        raise PhaseError(
            f"{name}: there are no gradients; {int(driver.state.step)} updates so far.",
            cause="no backward ran since the last step() or zero_grad(), or it ran on "
            "another model, or none of this model's parameters took part in the loss.",
            fix="run loss.backward() or engine.backward(loss) before it.",
        )
    return driver.state


def reduced(driver: Driver, name: str, path: str = "") -> bool:
    """Reduce what waits on any rank; return whether any rank holds gradients."""
    require_no_window(driver, name)
    _drop_what_user_dropped(driver)
    said = _agreed(driver, f"{name} {path}".strip())
    if said.held:
        driver.put(reduce_agreed(driver.state, said, used=0))
    return said.held


def _drop_what_user_dropped(driver: Driver) -> None:
    driver.wait()
    with raises_together(driver.axis):
        driver.drop_if_user_did()


def _agreed(driver: Driver, name: str, *, updates: bool = False) -> Agreed:
    """Ask all ranks what they hold of gradients; for an update, also which leaves they used."""

    def now() -> list[TrainState]:
        driver.running.take_served()
        return driver.running.states

    name = f"{name} of engine {driver.number}{driver.gradients.said}"
    written = driver.writes.since if updates else bool
    return agree(name, now(), updates=updates, uses=updates, now=now, written=written)[0]


def call_step(driver: Driver, every: int) -> bool:
    """Count a call of `step()`; update at every `every`-th one. Return whether it was due."""
    require_outside(driver, "step()")
    require_no_window(driver, "step()")
    if isinstance(driver.state.setup.optimizer, NoOptimizer):
        raise without_optimizer()
    _drop_what_user_dropped(driver)
    counted, due = progress.call_step(driver.state.progress, every)
    if due:
        _step(driver)
    else:
        driver.put(driver.state.replace(progress=counted))
    return due


def _step(driver: Driver) -> None:
    """Update the parameters from the gradients, and clear those."""
    with raises_together(driver.axis):
        driver.params.require_same()
        if (error := driver.writes.error()) is not None:
            raise error
        driver.gradients.require_taken()
        driver.put(with_value(driver.state))
    said = _agreed(driver, "step()", updates=True)
    if said.written:
        driver.writes.compare(driver.running.performer)
    if error := nonfinite([driver.state], None, [said]):
        raise error
    driver.masters.follow(driver.state)
    state = reduce_agreed(driver.state, said, used=0)
    driver.put(state)  # if the optimizer raises, this is what the engine has
    with driver.guard.stepping():
        new, norm = update(state, said.unused)
    driver.gradients.drop()
    driver.stepped(new, norm)


def clip(driver: Driver, max_norm: float) -> Tensor:
    """Scale the gradients to a global norm of at most `max_norm`; return that before."""
    good = max_norm == float("inf") or (is_number(max_norm) and max_norm >= 0)
    require("clip_grad_norm_(): max_norm", max_norm, lambda _: good, "a number of 0 or more")
    held = reduced(driver, f"clip_grad_norm_({max_norm})")
    state = driver.state
    norm = norm_of_state(state, state.gradients) * share(state)
    if not held:  # as torch.nn.utils.clip_grad_norm_: nothing to scale
        return norm
    gradients = scaled(state, state.gradients, clip_factor(norm, max_norm))
    driver.put(state.replace(gradients=gradients))
    driver.gradients.changed()
    return norm


@torch.no_grad()
def clip_value(driver: Driver, clip_value: float) -> None:
    """Bound each element of the gradients by `clip_value`, in place."""
    good = is_number(clip_value) and clip_value >= 0
    name = "clip_grad_value_(): clip_value"
    require(name, clip_value, lambda _: good, "a number of 0 or more")
    require_ordered("clip_grad_value_()", driver.state.setup.layout.leaves)
    state = with_gradients(driver, f"clip_grad_value_({clip_value})")
    for index, flat in zip(state.setup.layout.trainable, state.gradients.flats, strict=True):
        low, high = (as_held(state, index, bound) for bound in (-clip_value, clip_value))
        change(flat, state.device, partial(Tensor.clamp_, min=low, max=high))
    driver.gradients.changed()


def zero_grad(driver: Driver) -> progress.Progress:
    """Throw away every gradient; return the progress from before. No collective in a window."""
    driver.require_not_closed()
    if not in_backward():
        driver.events.abandon()  # the gradients of a backward that raised are thrown away
        driver.running.put_aside()  # and those that came inside of a forward
    driver.forget_norm()
    if not driver.state.window.is_open:
        call(driver, "zero_grad()")
        if driver.state.scale is not None:
            driver.put(driver.state.replace(scale=scale.forget(driver.state.scale)))
    counted = driver.state.progress
    driver.gradients.drop()
    driver.clear()
    return counted


# Windows.


@contextmanager
def window(driver: Driver, name: str) -> Iterator[None]:
    """Gradients of the block wait, unreduced. One that raises leaves what was there before."""
    require_outside(driver, name)
    require_no_window(driver, name)
    driver.wait()
    opened = open_window(replace(driver.state.window, pending=CLOSED.pending))
    driver.enter_window(driver.state.replace(window=opened))
    good = False
    try:
        yield
        good = True
    finally:
        driver.wait()
        if good:
            driver.drop_if_user_did()
        now, before = driver.state, driver.leave_window()
        waits, counted = before.window.pending, now.progress if good else before.progress
        if good and now.window.pending.held:  # with what waited before, for one reduction
            waits = buffers.add(waits, now.window.pending)
        shut = replace(now.window, pending=waits, gathered=(), is_open=False)
        driver.put(now.replace(window=shut, progress=counted))
        driver.show_gradients()
        driver.running.window_ends()


def reduce_what_waits(driver: Driver, name: str) -> None:
    """Reduce what waits, if there is anything on any rank."""
    said = _agreed(driver, name)
    if said.waits:
        driver.put(reduce_agreed(driver.state, said, used=0))
        driver.show_gradients()


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


def require_no_window(driver: Driver, name: str) -> None:
    """Raise `PhaseError` inside a window."""
    if driver.state.window.is_open:
        raise PhaseError(
            f"{name} inside a window (coalesce() or no_sync()).",
            cause="the window was left open around the whole step, or gradients were asked "
            "for before it has reduced them.",
            fix="leave the `with engine.coalesce():` block first; its end reduces what it "
            "collected.",
        )
