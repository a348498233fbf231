"""The coalescing window: gradients left local while it is open, reduced once when it closes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fzero.errors import PhaseError
from fzero.state._record import record, static
from fzero.state.buffers import Buffers, Placement


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


def saw_backward(window: Window, count: int) -> Window:
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
