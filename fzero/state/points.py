"""The points of a step, and the record of what a transform does at them.

loss -> local -> wire -> reduced -> update -> updated
each call, each call, each bucket, then once for each update
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fzero.state.codec import Codec
from fzero.state.form import Form

Needs = Literal["element", "matrix"]
"""What a transform looks at to change an element: that element, or its whole leaf."""

POINTS = ("loss", "local", "wire", "reduced", "update", "updated")
"""The points of a step, in their order."""

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Points:
    """What a transform does at the points of a step: pure functions, and the slots they keep.

    Attributes:
        name: of the transform; its slots are "<name>/<slot>" in a state.
        slots: {slot: form} as pairs; None: each slot of `init` has the form of a leaf that learns.
        init: (params, ctx) -> {slot: value}, the slots before the first update.
        loss: (slots, value, ctx) -> value.
        local: (slots, g, ctx) -> (slots, g).
        wire: the codec of gradients that cross ranks.
        reduced: (slots, grads, ctx) -> (slots, grads).
        update: (slots, grads, ctx, rule) -> (slots, params).
        updated: (slots, params, ctx) -> (slots, params).
        reads: "before": the parameters before the update are kept for `updated`.
        needs: "matrix": `reduced` and `updated` get whole leaves, on the ranks that own them.
        excludes: the names of transforms and options that it cannot stand beside.
        checked: the first calls that were found right, by point and rank.
    """

    name: str
    slots: tuple[tuple[str, Form], ...] | None = None
    init: Function | None = None
    loss: Function | None = None
    local: Function | None = None
    wire: Codec | None = None
    reduced: Function | None = None
    update: Function | None = None
    updated: Function | None = None
    reads: tuple[str, ...] = ()
    needs: Needs = "element"
    excludes: tuple[str, ...] = ()
    checked: set[Any] = field(default_factory=set, compare=False, repr=False)

    @property
    def at(self) -> tuple[str, ...]:
        """The points at which it does something."""
        return tuple(point for point in POINTS if getattr(self, point) is not None)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.at)})"
