"""Calls that every rank makes together: the ranks agree on what they hold, and reduce it.

Each rank says which call it makes. If some ranks make another call, or none, all of them raise. A
rank that is still in a backward gets the collectives that it needs until it makes the call, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fzero.adapter.driver import Driver
from fzero.adapter.hooks import in_backward
from fzero.errors import CallError
from fzero.optim import NoOptimizer
from fzero.optim.optimizer import without_optimizer
from fzero.optim.step_hooks import has_pre_hooks
from fzero.state import Placement, TrainState, buffers, progress
from fzero.state.progress import CLOSED, open_window
from fzero.transforms.backward_pass import raises_together, reduce_agreed, refused
from fzero.transforms.points import renewed
from fzero.transforms.recipe import begun, forgotten
from fzero.transforms.update import update


def step(driver: Driver, every: int, closure: Any = None) -> bool:
    """Count a call; at every `every`-th one update the parameters, and clear the gradients.

    Returns whether it was due.
    """
    if closure is not None:
        raise CallError(
            f"engine.step() was given a {type(closure).__name__}.",
            cause="optimizer.step(closure), as torch.optim has it, or a scaler's step(optimizer).",
            fix="call `loss = closure()`, whose backward brings the gradients, then engine.step() "
            "without an argument. LBFGS, which calls its closure several times, is not for ranks.",
        )
    driver.require_not("step()", "loop", "backward", "forward", "window", "left loop")
    driver.say_dropped()
    if isinstance(driver.state.setup.optimizer, NoOptimizer):
        raise without_optimizer()
    driver.drop_what_user_dropped()
    counted, due = progress.call_step(driver.state.progress, every)
    if not due:
        driver.put(driver.state.replace(progress=counted))
        return False
    guard = driver.guard
    with raises_together(driver.axis):
        driver.params.require_same()
        if (error := driver.writes.error()) is not None:
            raise error
        driver.put(begun(driver.state))
    agreed = driver.agreed("step()", updates=True)
    with raises_together(driver.axis):
        guard.require_same()  # on this rank as before; ranks have compared their options
    if agreed.written:
        driver.writes.compare(driver.state, driver.running.performer)
    if error := refused([driver.state], None, [agreed]):
        raise error
    state = reduce_agreed(driver.state, agreed, used=0)
    driver.put(state)  # if the optimizer raises, this is what the engine has
    if not driver.stand_ins.standing:  # other ranks had a backward
        driver.show_gradients()

    def begin() -> TrainState:
        """After the step pre hooks, which may write to gradients and to parameters."""
        if guard.optimizer is not None and has_pre_hooks(guard.optimizer, but=1):
            driver.stand_ins.require_none_replaced()
        driver.writes.follow(driver.state)
        guard.show_state(own=True)
        return driver.state

    def end(new: TrainState) -> None:
        """Before the step post hooks, which read the new parameters."""
        guard.show_state(own=False)
        weighted = state.setup.reduction.weighted
        guard.was_empty = weighted and bool((new.step == state.step).all())
        driver.stand_ins.drop()
        driver.put(new)
        driver.published()

    with guard.stepping():
        _, guard.norm = update(state, agreed.unused, begin=begin, end=end)
    if driver.loops.buffers is not None:
        driver.loops.buffers.merge(driver.state.setup, driver.running.performer)
    return True


def zero_grad(driver: Driver) -> progress.Progress:
    """Throw away every gradient; return the progress from before. No collective in a window."""
    driver.require_not("zero_grad()", "loop")
    driver.loops.left = False
    if not in_backward():
        driver.events.abandon()  # the gradients of a backward that raised are thrown away
        driver.running.put_aside()  # and those that came inside of a forward
    driver.guard.norm = None
    if not driver.state.window.is_open:
        driver.call("zero_grad()")
        driver.put(forgotten(driver.state))
    counted = driver.state.progress
    driver.stand_ins.drop()
    driver.clear()
    return counted


# Windows.


@contextmanager
def coalesce(driver: Driver) -> Iterator[None]:
    """Any number of backwards, one reduction, at the end of the block. A collective.

    A block that raises brings nothing, and leaves what was there before: the next backward or
    `step()` then warns of how many backwards were dropped.
    """
    with _window(driver, "coalesce()"):
        yield
    agreed = driver.agreed("the end of coalesce()")
    if agreed.waits:
        driver.put(reduce_agreed(driver.state, agreed, used=0))
        driver.show_gradients()


@contextmanager
def no_sync(driver: Driver) -> Iterator[None]:
    """Like `coalesce`, but the reduction is left to the next backward, or to `step`.

    Unlike in DDP, which keeps the backwards of a block that raises, they are dropped: ranks that
    raise in other places would go on with other numbers of micro-batches in one mean.
    """
    with _window(driver, "no_sync()"):
        yield


@contextmanager
def _window(driver: Driver, name: str) -> Iterator[None]:
    """Gradients of the block wait, unreduced. One that raises leaves what was there before."""
    driver.require_not(name, "loop", "backward", "window")
    driver.wait()
    driver.outside = before = driver.state
    opened = open_window(replace(before.window, pending=CLOSED.pending))
    driver.put(renewed(before, "window").replace(window=opened))
    good, error = False, None
    try:
        yield
        good = True
    except BaseException as raised:
        error = raised
        raise
    finally:
        driver.wait()
        if good:
            driver.drop_if_user_did()
        now, before, driver.outside = driver.state, driver.outside, None
        if good:
            waits = before.window.pending
            if now.window.pending.held:  # with what waited before, for one reduction
                waits = buffers.add(waits, now.window.pending)
            shut = replace(now.window, pending=waits, gathered=(), is_open=False)
            driver.put(now.replace(window=shut))
        else:
            # Without what the block has brought. What it took part in that other ranks reduced is
            # every rank's, and stays; so do slots that are the same on every rank, which this
            # block alone cannot have changed.
            alike = {k: x for k, x in now.slots.items() if x.form.placement is Placement.REPLICATED}
            setup = replace(now.setup, reduction=before.setup.reduction)
            kept = now.replace(window=before.window, progress=before.progress, setup=setup)
            driver.put(kept.replace(slots={**before.slots, **alike}))
            lost = now.progress.backwards - before.progress.backwards
            driver.note_dropped(name, lost, type(error).__name__)
        driver.show_gradients()
        driver.running.window_ends()
