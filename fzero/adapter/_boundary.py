"""Calls that every rank makes together: the ranks agree on what they hold, and reduce it.

Each rank says which call it makes. If some ranks make another call, or none, all of them raise. A
rank that is still in a backward gets the collectives that it needs until it makes the call, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from fzero._check import is_number, require
from fzero.adapter._driver import Driver
from fzero.adapter._events import in_backward
from fzero.errors import PhaseError
from fzero.optim import NoOptimizer, without_optimizer
from fzero.state import TrainState, buffers, progress, scale
from fzero.state.window import CLOSED, open_window
from fzero.transforms._finite import first_of, report_of
from fzero.transforms._receive import accumulate, filled, reduce_window
from fzero.transforms.update import clip_factor, norm_of_state, scaled, share, update


def call(driver: Driver, name: str, value: int = 0) -> frozenset[int]:
    """Wait until every rank makes this call; return the values that they give, each once."""
    driver.require_not_closed()
    channel = driver.running.channel
    if channel is None:
        return frozenset([value])
    values = channel.call(f"{name} of engine {driver.number}", value)
    driver.running.take_served()
    return values


def with_gradients(driver: Driver, name: str, path: str = "") -> TrainState:
    """Reduce what waits on any rank; return the state, which holds all gradients then.

    `path`: of the parameter that the call is about.

    Raises `PhaseError` if no rank holds any.
    """
    require_no_window(driver, name)
    driver.wait()
    driver.drop_if_user_did()
    state, waits, _ = _agreed(driver, f"{name} {path}".strip())
    driver.put(_reduced(state, waits))
    return driver.state


def _agreed(driver: Driver, name: str) -> tuple[TrainState, bool, bool]:
    """Return what all ranks know, and raise `PhaseError` if none of them holds gradients.

    The state, with the backwards of the rank that made the most; whether gradients of any rank
    wait; whether a gradient or loss of any rank is not finite.
    """
    state = driver.state
    held = int(state.window.pending.held) + 2 * int(state.gradients.held)
    bad = 4 * int(state.progress.nonfinite is not None)
    codes = call(driver, name, held + bad + 8 * state.progress.backwards)
    if not any(code & 3 for code in codes):
        raise PhaseError(
            f"{name}: there are no gradients; {int(state.step)} updates so far.",
            cause="no backward ran since the last step() or zero_grad(), or it ran on "
            "another model, or none of this model's parameters took part in the loss.",
            fix="run loss.backward() or engine.backward(loss) before it.",
        )
    state, backwards = driver.state, max(max(code >> 3 for code in codes), 1)
    agreed = state.replace(progress=replace(state.progress, backwards=backwards))
    return agreed, any(code & 1 for code in codes), any(code & 4 for code in codes)


def _reduced(state: TrainState, waits: bool) -> TrainState:
    """Reduce what `waits` on any rank. A collective if something does."""
    if waits:
        return reduce_window(state)
    if state.gradients.held:
        return state
    return accumulate(state, filled(state, {}, state.setup.gradients))  # zeros


def call_step(driver: Driver, every: int) -> bool:
    """Count a call of `step()`; update at every `every`-th one. Return whether it was due."""
    require_outside(driver, "step()")
    require_no_window(driver, "step()")
    if isinstance(driver.state.setup.optimizer, NoOptimizer):
        raise without_optimizer()
    driver.wait()
    driver.drop_if_user_did()
    counted, due = progress.call_step(driver.state.progress, every)
    if due:
        _step(driver)
    else:
        driver.put(driver.state.replace(progress=counted))
    return due


def _step(driver: Driver) -> None:
    """Update the parameters from the gradients, and clear those."""
    driver.params.require_same()
    state, waits, bad = _agreed(driver, "step()")
    if bad and (error := first_of(driver.running.channel, report_of([driver.state]))) is not None:
        raise error
    driver.masters.follow(state)
    state = _reduced(state, waits)
    driver.put(state)  # if the optimizer raises, this is what the engine has
    with driver.guard.stepping():
        new, driver.norm = update(state)
    driver.gradients.drop()
    driver.put(new)
    driver.published()


def clip(driver: Driver, max_norm: float) -> Tensor:
    """Scale the gradients to a global norm of at most `max_norm`; return that before."""
    good = max_norm == float("inf") or (is_number(max_norm) and max_norm >= 0)
    require("clip_grad_norm_(): max_norm", max_norm, lambda _: good, "a number of 0 or more")
    state = with_gradients(driver, f"clip_grad_norm_({max_norm})")
    norm = norm_of_state(state, state.gradients) * share(state)
    gradients = scaled(state, state.gradients, clip_factor(norm, max_norm))
    driver.put(state.replace(gradients=gradients))
    return norm


def zero_grad(driver: Driver) -> progress.Progress:
    """Throw away every gradient; return the progress from before. No collective in a window."""
    driver.require_not_closed()
    if not in_backward():
        driver.events.abandon()  # the gradients of a backward that raised are thrown away
        driver.running.put_aside()  # and those that came inside of a forward
    driver.norm = None
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
    before = driver.state
    opened = open_window(replace(before.window, pending=CLOSED.pending))
    driver.put(before.replace(window=opened))
    driver.outside = before
    good = False
    try:
        yield
        good = True
    finally:
        driver.wait()
        if good:
            driver.drop_if_user_did()
        now, before, driver.outside = driver.state, driver.outside, None
        waits, counted = before.window.pending, now.progress if good else before.progress
        if good and now.window.pending.held:  # with what waited before, for one reduction
            waits = buffers.add(waits, now.window.pending)
        shut = replace(now.window, pending=waits, gathered=(), is_open=False)
        driver.put(now.replace(window=shut, progress=counted))
        driver.show_gradients()
        driver.running.window_ends()


def reduce_what_waits(driver: Driver, name: str) -> None:
    """Reduce what waits, if there is anything on any rank."""
    waits = any(call(driver, name, int(driver.state.window.pending.held)))
    if waits:
        driver.put(_reduced(driver.state, waits))
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
