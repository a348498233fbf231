"""The coalescing window: gradients left local while it is open, reduced once when it closes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fzero.errors import PhaseError, explain
from fzero.state import buffers
from fzero.state._record import record, static
from fzero.state.buffers import Buffers, Placement


@record
class Window:
    """Whether a window is open, and what has gathered in it.

    `pending` is PARTIAL: this rank's own sum. `gathered` holds full parameters for the length
    of the window when stage 3 was asked to keep them (else it is empty).
    """

    pending: Buffers
    gathered: tuple[Tensor, ...] = ()
    is_open: bool = static(default=False)


CLOSED = Window(pending=Buffers(placement=Placement.PARTIAL))


def open_window(window: Window) -> Window:
    """Open `window`. Raises `PhaseError` if it is open already."""
    if window.is_open:
        raise PhaseError(
            explain(
                "coalesce: a window is already open in this state.",
                cause="a coalesced step was called inside another coalesced step.",
                fix="keep only the outer fzero.coalesce: one window reduces everything once.",
            )
        )
    return Window(pending=window.pending, gathered=window.gathered, is_open=True)


def put(window: Window, gradients: Buffers) -> Window:
    """Add this rank's own gradients to what is pending.

    In a closed window (an engine's, after `no_sync`) they wait for the next reduction.
    """
    return replace(window, pending=buffers.add(window.pending, gradients))


def take(window: Window, *, keep_gathered: bool = False) -> tuple[Window, Buffers]:
    """Return the window without its pending gradients (still open if it was), and those.

    Gathered parameters go as well, for what follows is an update, unless they are to be kept.
    """
    gathered = window.gathered if keep_gathered else ()
    return Window(pending=CLOSED.pending, gathered=gathered, is_open=window.is_open), window.pending


def close(window: Window) -> Window:
    """Close an emptied window. Raises `PhaseError` if gradients would be lost."""
    if window.pending.held:
        raise PhaseError(
            explain(
                "the window still holds unreduced gradients.",
                cause="window.close before window.take.",
                fix="take the pending gradients and reduce them first.",
            )
        )
    return CLOSED
