"""States that a loss only reads: nothing of them is differentiated, reduced or counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import optree

from fzero.errors import LayoutError
from fzero.state import NAMESPACE, Buffers, Layout, TrainState
from fzero.state.progress import CLOSED
from fzero.transforms.states import is_state


def learning(wrt: Any, tree: Any, states: Sequence[TrainState]) -> list[bool]:
    """Whether each of `states`, which are those of `tree`, is differentiated by.

    wrt: None for all; a key of the tree, or several; or a pytree of bools in its structure.
    Raises `LayoutError` for what names no state.
    """
    if wrt is None:
        return [True] * len(states)
    paths = optree.tree_paths(tree, is_leaf=is_state, namespace=NAMESPACE)
    keys = [path[0] if path else None for path in paths]
    if isinstance(wrt, dict) or _has_flags(wrt):
        return _flags(wrt, tree)
    wanted = list(wrt) if isinstance(wrt, list | tuple | set | frozenset) else [wrt]
    unknown = [key for key in wanted if key not in keys]
    if unknown or not wanted or is_state(tree):
        raise _misfit(f"wrt={wrt!r} of {'one state' if is_state(tree) else f'states at {keys}'}")
    return [key in wanted for key in keys]


def _has_flags(wrt: Any) -> bool:
    return isinstance(wrt, list | tuple) and bool(wrt) and all(isinstance(x, bool) for x in wrt)


def _flags(wrt: Any, tree: Any) -> list[bool]:
    spec = optree.tree_structure(tree, is_leaf=is_state, namespace=NAMESPACE)
    try:
        prefix: Any = optree.tree_broadcast_prefix(wrt, tree, is_leaf=is_state, namespace=NAMESPACE)
        flags: Any = spec.flatten_up_to(prefix)
    except ValueError as error:
        raise _misfit(f"wrt={wrt!r} does not fit the states: {error!s:.200}") from None
    if not all(isinstance(x, bool) for x in flags) or not any(flags):
        raise _misfit(f"wrt={wrt!r} names no state, or is no pytree of bools")
    return flags


def _misfit(seen: str) -> LayoutError:
    return LayoutError(
        f"grad_and_reduce: {seen}.",
        cause="a key that the pytree of states does not have, or the name of a parameter.",
        fix='give a key of the states, wrt="d", several, or bools in their structure.',
    )


def require_learner(states: Sequence[TrainState], name: str) -> None:
    """Raise `LayoutError` if no leaf of any of the states learns: there is no gradient then."""
    if not any(state.setup.layout.trainable for state in states):
        raise learns_nothing(name)


def learns_nothing(name: str) -> LayoutError:
    """Return the error of a call about gradients of states all of whose leaves are frozen."""
    return LayoutError(
        f"{name}: no leaf of the state learns, so it has no gradients.",
        cause="a state that was made with fzero.optim.no_optimizer() is only read; or every leaf "
        "is frozen (trainable=, requires_grad=False, wrt=).",
        fix="to read it use fzero.evaluate(fn, state)(x), or one loss of a pytree of states, of "
        "which others learn. For gradients of a model that is never updated (SAM, "
        "meta-gradients) make it with fzero.optim.sgd(0.0), which keeps no moments.",
    )


def as_read(state: TrainState) -> TrainState:
    """Return a state whose parameters are those of this one, and all frozen, for one pass."""
    setup = replace(state.setup, layout=_frozen(state.setup.layout))
    waits = replace(CLOSED, gathered=state.window.gathered, is_open=state.window.is_open)
    # What is recorded of the pass is apart from that of passes that differentiate by this state.
    counted = replace(state.progress, backwards=state.progress.backwards + 1)
    return state.replace(setup=setup, gradients=Buffers(), window=waits, slots={}, progress=counted)


def after_reading(state: TrainState, read: TrainState) -> TrainState:
    """Return the state that was read as it is after that: only its schedule may be another one."""
    gathered = replace(state.window, gathered=read.window.gathered)
    return state.replace(schedule=read.schedule, window=gathered)


@lru_cache(maxsize=64)
def _frozen(layout: Layout) -> Layout:
    return replace(
        layout,
        leaves=tuple(replace(leaf, trainable=False) for leaf in layout.leaves),
        groups=tuple(replace(group, trainable=False) for group in layout.groups),
    )
