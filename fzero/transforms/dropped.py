"""Which states a step has made that nothing has used: an update, or gradients, that are dropped.

    made    a call has returned a state with new tensors          noted, with its line
    took    a call was given a state, or the step returned it     what it has is used

A state is known by some of its tensors, which copies of it by `replace` share. Outside of a step
nothing is noted: what becomes of a state is not known there. What a step inside of another one
returns counts as used.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import optree
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.context.here import is_abstract
from fzero.errors import explain
from fzero.state import NAMESPACE, TrainState

_SAID: dict[Any, Any] = {}
_NOT_USERS = ("fzero.", "torch.")


class Made(NamedTuple):
    """What a call has returned that its states were not given."""

    name: str
    tensors: dict[int, Any]  # by id, for as long as it is not used
    line: tuple[str, int]


class _Here(threading.local):
    """What the outermost step of this thread has made; None outside of a step."""

    made: list[Made] | None = None

    def begin(self) -> list[Made] | None:
        """A step begins: return where its states are noted; None inside of another one."""
        if self.made is not None:
            return None
        self.made = []
        return self.made

    def end(self) -> None:
        """It is over."""
        self.made = None


HERE = _Here()


def note_made(name: str, given: Sequence[TrainState], new: Sequence[TrainState]) -> None:
    """Note the states that a call returns."""
    if (noted := HERE.made) is None or get_proxy_mode() is not None or is_abstract():
        return  # a record may be read further than the step
    fresh = dict[int, Any]()
    for some, is_new in ((new, True), (given, False)):
        for one in some:
            flats = one.params.flats[:1] + one.gradients.flats[:1] + one.window.pending.flats[:1]
            for x in (one.step, *flats):
                if is_new:
                    fresh[id(x)] = x
                else:
                    fresh.pop(id(x), None)
    if fresh:
        frame: Any = sys._getframe(1)  # up to where the user has called fzero
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(_NOT_USERS):
            frame = frame.f_back
        noted.append(Made(name, fresh, (frame.f_code.co_filename, frame.f_lineno)))


def took(states: Iterable[TrainState]) -> None:
    """Note that a call was given these states."""
    if noted := HERE.made:
        used = _tensors_of(states)
        noted[:] = [one for one in noted if used.isdisjoint(one.tensors)]


def left_by(noted: list[Made], returned: Any) -> Made | None:
    """Return the last of what a step has made and dropped, given what it returns."""
    if noted:
        first = returned[0] if isinstance(returned, tuple) and returned else None
        if isinstance(first, TrainState):
            took([first])
        if noted:
            tree: Any = returned
            leaves: Any = optree.tree_leaves(tree, is_leaf=_is_state, namespace=NAMESPACE)
            took(filter(_is_state, leaves))
    return noted[-1] if noted else None


def warn_of(one: Made, step: str) -> None:
    """Say so, with the line of the call."""
    text = explain(
        f"what {one.name} returned was not used, and {step} has returned no state that came of it.",
        cause=f"`fzero.{one.name}(state)` without `state = ...`: states are values, and the one "
        "that is given stays as it was; or a step that returns the state that it was given.",
        fix="write state = fzero.apply_gradients(state), and return that state. For the value of "
        "a loss alone, fzero.evaluate(loss, state)(batch); of several states, `wrt=` says which "
        "of them are to learn.",
    )
    warnings.warn_explicit(text, UserWarning, *one.line, registry=_SAID)


def _is_state(x: Any) -> bool:
    return isinstance(x, TrainState)


def _tensors_of(states: Iterable[TrainState]) -> set[int]:
    """What changes in an update, and with gradients: one tensor of each kind, by id."""
    found = set[int]()
    for one in states:
        flats = one.params.flats[:1] + one.gradients.flats[:1] + one.window.pending.flats[:1]
        found.update(map(id, (one.step, *flats)))
    return found
