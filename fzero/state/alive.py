"""A state that a donating step has used up holds empty tensors: no read of it may go unnoticed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fzero.errors import DonatedError


def require_not_donated(state: Any) -> None:
    """Raise `DonatedError` if `state`, or its gradients, was used up by a donating step.

    Args:
        state: of one rank, or stacked: [W, *t] for each tensor [*t].
    """
    if (gone := donated(state)) is not None:
        what, group = gone
        raise DonatedError(
            f"this state was donated: a newer state has the {what} of {group} now.",
            cause="a state was used again after a step made with shard(..., donate=True), or "
            "engine.step(), took it.",
            fix="go on with the state that the step returned, or keep a copy before it: "
            "copy.deepcopy(state).",
        )


def donated(state: Any) -> tuple[str, str] | None:
    """Return what of a state, and of which group, a donating step has taken; None for nothing."""
    layout = state.setup.layout
    count = getattr(state.optimizer, "count", None)
    if isinstance(count, Tensor) and not count.numel():  # parameters may all be empty ones
        return "optimizer state", layout.groups[0].name
    every = tuple(range(len(layout.groups)))
    held = (
        ("parameters", state.params, every),
        ("gradients", state.gradients, layout.trainable),
        ("gradients", state.window.pending, layout.trainable),
    )
    for what, buffers, groups in held:
        for flat, index in zip(buffers.flats, groups if buffers.flats else (), strict=True):
            if layout.full_numel(index) and not flat.numel():
                return what, layout.groups[index].name
    return None
