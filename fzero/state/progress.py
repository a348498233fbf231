"""What has happened since the last update: host integers, exact under `==`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from torch import Tensor

from fzero.errors import PhaseError, explain
from fzero.state.buffers import Buffers, Placement, record, static


class Phase(Enum):
    """Where a state stands between two updates."""

    IDLE = "idle"  # no gradient since the last update
    LOCAL = "local gradients"  # gradients wait, unreduced, in an open window
    READY = "gradients ready"  # reduced gradients are held


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """What this rank's own backward brought that is NaN or infinite."""

    what: Literal["loss", "gradient"]
    leaf: int | None  # the first one whose gradient is so
    place: int  # of that gradient among all of that backward
    backward: int = 0  # how many came before since the update


ALL = -1
"""Every leaf, as a number whose bit i says whether leaf i is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of one step; all reset to 0 by an update, by nothing else.

    `used`: bit i is set if leaf i has got a gradient on this rank. What a functional step adds
    counts for all leaves: there a zero gradient is a gradient, as in JAX.
    """

    backwards: int = 0  # grad_and_reduce calls
    reductions: int = 0  # times that gradients crossed ranks
    calls: int = 0  # step() calls of an engine
    deferred: bool = False  # an update waits for the last micro-batch
    nonfinite: NonFinite | None = None  # the first that was found, if somebody looks for it
    used: int = 0  # leaves, bit by bit


def count_backward(progress: Progress, *, reduced: bool, used: int = ALL) -> Progress:
    """Count one gradient, of the leaves that are `used`, and its reduction unless it stays local.

    Raises `PhaseError` after a deferred update: the gradient would be mixed into that update.
    """
    _require_not_deferred(progress, "grad_and_reduce")
    return replace(
        progress,
        backwards=progress.backwards + 1,
        reductions=progress.reductions + int(reduced),
        used=progress.used | used,
    )


def saw_use(progress: Progress, used: int) -> Progress:
    """Note leaves that have got a gradient in another way than by a backward that is counted."""
    return replace(progress, used=progress.used | used)


def without_use(progress: Progress, unused: int) -> Progress:
    """Forget that these leaves have got a gradient."""
    return replace(progress, used=progress.used & ~unused) if unused else progress


def of_all_ranks(progress: Progress, backwards: int, used: int) -> Progress:
    """Return the progress of a rank that goes on with the gradients of all ranks.

    backwards: of the rank that made the most. used: leaves that count as used here, too.
    """
    backwards, used = max(progress.backwards, backwards, 1), progress.used | used
    if (backwards, used) == (progress.backwards, progress.used):
        return progress
    return replace(progress, backwards=backwards, used=used)


def saw_nonfinite(progress: Progress, found: NonFinite | None) -> Progress:
    """Note what the backward that is counted next has brought, unless something was before it."""
    if found is None or progress.nonfinite is not None:
        return progress
    return replace(progress, nonfinite=replace(found, backward=progress.backwards))


def saw_reduction(progress: Progress) -> Progress:
    """Count the one reduction of a window."""
    return replace(progress, reductions=progress.reductions + 1)


def defer_update(progress: Progress) -> Progress:
    """Let an update wait for the last micro-batch. Raises `PhaseError` for a second one."""
    _require_not_deferred(progress, "apply_gradients")
    return replace(progress, deferred=True)


def saw_update(progress: Progress) -> Progress:
    """Start again. Raises `PhaseError` when there was no gradient to update from."""
    require_gradients(progress, "apply_gradients")
    return Progress()


def require_gradients(progress: Progress, name: str) -> None:
    """Raise `PhaseError` when the call `name` finds no gradient."""
    if not progress.backwards:
        raise PhaseError(
            f"{name}: the state holds no gradients.",
            cause="a state from before grad_and_reduce (which returns a new state), or from "
            "after apply_gradients (which clears them).",
            fix="write `state, loss = fzero.grad_and_reduce(fn, state)(batch)`, and go on with "
            "the state it returned.",
        )


def call_step(progress: Progress, every: int) -> tuple[Progress, bool]:
    """Count a step() call: is the update due? It is at every `every`-th call.

    Example:
        >>> progress, due = call_step(Progress(), 2)
        >>> due, call_step(progress, 2)[1]
        (False, True)
    """
    progress = replace(progress, calls=progress.calls + 1)
    return progress, progress.calls >= every


def thrown_away(progress: Progress, every: int) -> str:
    """What to warn of before gradients are cleared: an accumulation starts again; "" if nothing."""
    if not progress.calls:
        return ""
    return explain(
        f"zero_grad() throws away the gradients of {progress.calls} of {every} micro-batches; the "
        "accumulation starts again.",
        cause="a training loop that clears before every micro-batch.",
        fix="leave zero_grad() out: step() clears after each update.",
    )


def _require_not_deferred(progress: Progress, name: str) -> None:
    if progress.deferred:
        raise PhaseError(
            f"{name} after apply_gradients, inside fzero.accumulate.",
            cause="a step with several updates (or a gradient after its update) was wrapped "
            "whole; the update waits for the last micro-batch, so gradients of two updates "
            "would be lost in one sum.",
            fix="put fzero.accumulate around each part of the step that ends with its update.",
        )


# The coalescing window: gradients left local while it is open, reduced once when it closes.


@record
class Window:
    """A coalescing window: whether it is open, and the gradients that wait in it.

    `pending` is PARTIAL: this rank's own sum; in a closed window (an engine's, after `no_sync`) it
    waits for the next reduction. `gathered` holds full parameters for the length of the window when
    stage 3 was asked to keep them (else it is empty).
    """

    pending: Buffers
    gathered: tuple[Tensor, ...] = ()
    is_open: bool = static(default=False)  # the gradient of the next backward waits in it
    length: int = static(default=0)  # how many backwards it takes; 0: nobody has said
    is_settled: bool = static(default=False)  # all ranks have made an update since it was opened


CLOSED = Window(pending=Buffers(placement=Placement.PARTIAL))


def open_window(window: Window, length: int = 0) -> Window:
    """Open `window`, for `length` backwards if that is known.

    Raises `PhaseError` if it is open already.
    """
    if window.is_open or window.length:
        raise PhaseError(
            "coalesce: a window is already open in this state.",
            cause="a coalesced step was called inside another coalesced step.",
            fix="keep only the outer fzero.coalesce: one window reduces everything once.",
        )
    return replace(window, is_open=True, length=length)


def add_backward(window: Window, count: int) -> Window:
    """Return the window after `count` backwards since the update: shut before its last one.

    That one reduces what waits together with its own gradient, bucket by bucket, while it runs.
    """
    return replace(window, is_open=bool((count + 1) % window.length)) if window.length else window


def pop(window: Window) -> tuple[Window, Buffers]:
    """Return the window without its pending gradients (still open if it was), and those.

    Gathered parameters go as well, for what follows is an update.
    """
    return replace(window, pending=CLOSED.pending, gathered=()), window.pending


def close(window: Window) -> Window:
    """Close a window whose gradients were taken."""
    return replace(window, gathered=(), is_open=False, length=0, is_settled=False)


def after_update(window: Window) -> Window:
    """Return the window after an update."""
    return replace(window, is_settled=window.is_open)


def forget(window: Window) -> Window:
    """Return the window without gradients: they are thrown away, pending or reduced."""
    return replace(window, pending=CLOSED.pending)
