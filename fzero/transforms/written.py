"""Buffers of a state that were written in place since a call returned it: the next call raises.

No call writes to the tensors of a state that it is given; a donating step makes new ones on their
memory. So torch's count of writes to each stays what it was when the state was returned. The counts
are kept beside the states, by tensor: in a record each step would have another treespec.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
from torch import Tensor

from fzero.context.modes import in_transform, is_recorded
from fzero.errors import PhaseError
from fzero.state import NAMESPACE, TrainState


class _Counted(weakref.ref[Tensor]):
    """A tensor, and how often it had been written to when a call returned it."""

    __slots__ = ("count", "key")
    count: int
    key: int


_COUNTS: dict[int, _Counted] = {}
"""By the id of a tensor. Those that are gone are dropped; nothing else depends on that."""


class _Here(threading.local):
    """How many calls of this thread look for changed bits themselves."""

    looking: int = 0


_HERE = _Here()


@contextmanager
def bits_are_compared() -> Iterator[None]:
    """Let writes be in this block: its caller finds bits that have changed, whoever changed them.

    The recorder does: a fault is planted in a state by a write to it.
    """
    _HERE.looking += 1
    try:
        yield
    finally:
        _HERE.looking -= 1


def returned(*states: TrainState, gradients: bool = False) -> None:
    """Note how often buffers have been written to: a call returns these states as they are.

    gradients: nothing else of the states is new.

    Under a transform and in a trace tensors are none that a user writes to; those of inference mode
    have no count.
    """
    if in_transform() or is_recorded(()):
        return
    for state in states:
        held: list[Any] = [*state.gradients.flats, *state.window.pending.flats]
        if not gradients:
            held += [*state.params.flats, *_kept(state)]
        _count(held)


def _kept(state: TrainState) -> list[Any]:
    """Return what the optimizer and transforms keep."""
    tree: Any = (state.optimizer, state.slots)
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def given_back(tensors: Iterable[Any]) -> None:
    """Note the counts anew of tensors whose memory was taken over, and given back."""
    _count([x for x in tensors if id(x) in _COUNTS])


def _count(tensors: Iterable[Any]) -> None:
    for x in tensors:
        if type(x) is Tensor and x.numel() and not x.is_inference():
            made = _Counted(x, _forget)
            made.key, made.count = id(x), x._version
            _COUNTS[made.key] = made


def _forget(gone: Any) -> None:
    _COUNTS.pop(gone.key, None)


def require_unwritten(state: TrainState, *, optimizer: bool = False) -> None:
    """Raise `PhaseError`, naming the buffer, if one was written to since a call returned it.

    optimizer: look at what the optimizer and transforms keep, too; else at parameters and gradients
    alone.
    """
    if _HERE.looking:
        return
    held: list[Any] = [*state.params.flats, *state.gradients.flats, *state.window.pending.flats]
    if optimizer:
        held += _kept(state)
    for x in held:
        found = _COUNTS.get(id(x))
        if found is None or found.count == x._version or found() is not x:
            continue
        if x.numel():  # else a donating step has emptied it, which another check finds
            raise _written(state, x)


def _written(state: TrainState, written: Tensor) -> PhaseError:
    tree: Any = state
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    names = (a.codify("state") for a, x in zip(accessors, leaves, strict=True) if x is written)
    return PhaseError(
        f"{next(names, 'a buffer of the state')} was written in place since a call returned it.",
        cause="an in-place method (zero_, mul_, copy_, clamp_) on a buffer of a state: states are "
        "immutable, and others share their tensors.",
        fix="make another state of new tensors: state.replace(params=dataclasses.replace("
        "state.params, flats=tuple(flat.clamp(-1, 1) for flat in state.params.flats))); fzero.init "
        "of changed fzero.full_params(state) begins the optimizer anew.",
    )
