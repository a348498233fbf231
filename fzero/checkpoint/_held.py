"""The states that this process holds, one for each of its ranks, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint._driven import Driven
from fzero.collectives import gather_parts
from fzero.errors import AxisError, LayoutError, PhaseError, explain
from fzero.homes import wait_for_copies
from fzero.mesh import Axis, Runtime
from fzero.state import NAMESPACE, Phase, Placement, TrainState
from fzero.state.alive import require_not_donated


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A process has one rank's state; with virtual ranks, all of them (views of the stack)."""

    axis: Axis  # the processes that save or load together
    ranks: tuple[int, ...]
    states: tuple[TrainState, ...]
    is_stack: bool = False  # all ranks are here, as fzero.simulate returns them


def held_things(name: str, thing: Any) -> tuple[TrainState, Driven | None]:
    """Return the state, and the engine that holds it if an engine was given.

    Raises `LayoutError` for something that is neither.
    """
    if isinstance(thing, TrainState):
        return thing, None
    if isinstance(thing, Driven) and isinstance(thing.state, TrainState):
        return thing.state, thing
    raise LayoutError(
        explain(
            f"{name}: expected a TrainState or an Engine, got a {type(thing).__name__}.",
            cause="parameters, or a dict of several states, were passed.",
            fix=f"give each state a path of its own: checkpoint.{name}(path / name, state).",
        )
    )


def held_states(name: str, state: TrainState) -> Held:
    """Return what of `state` is in this process, or raise for a state that cannot be used.

    Raises `DonatedError` for a used-up one, `AxisError` inside `fzero.simulate` or without the
    state's process group.
    """
    axis = state.setup.axis
    if tuple(state.step.shape) == (axis.size,):
        held = _of_stack(state, axis.size)
    elif axis.runtime is not Runtime.VIRTUAL:
        held = Held(axis=axis, ranks=(axis.rank,), states=(state,))
    else:
        raise AxisError(
            explain(
                f"{name}: a state of one virtual rank.",
                cause=f"checkpoint.{name} was called inside fzero.simulate.",
                fix=f"call it outside, with the stacked state of all {axis.size} ranks that "
                "simulate(...).init or the simulated step returns.",
            )
        )
    for one in held.states:
        require_not_donated(one)
        tree: Any = one
        wait_for_copies(optree.tree_leaves(tree, namespace=NAMESPACE))
    return held


def require_idle(state: TrainState) -> None:
    """Raise `PhaseError` for a state with gradients: a checkpoint stands between two updates."""
    if state.phase is Phase.IDLE and not state.window.is_open and not state.progress.backwards:
        return
    window = "open" if state.window.is_open else "closed"
    raise PhaseError(
        explain(
            f"save: the state is between gradient and update ({state.phase.value!r}, "
            f"{state.progress.backwards} backwards, window {window}).",
            cause="save was called inside a step, or before apply_gradients; or, under an engine, "
            "after a loss of several models of which one was not stepped.",
            fix="save the state that fzero.apply_gradients, or the whole step, returned; an engine "
            "after its step(), or after zero_grad() where its gradients are not wanted.",
        )
    )


def require_closed(state: TrainState) -> None:
    """Raise `PhaseError` inside a coalescing window, which would lose its gradients."""
    if state.window.is_open or state.window.pending.held:
        raise PhaseError(
            explain(
                "load: the state has an open coalescing window.",
                cause="load was called inside a coalesced step.",
                fix="load outside the step, into a state from init.",
            )
        )


def whole_flat(held: Held, flats: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return a whole flat from what each of the held ranks has of it. A collective if cut."""
    setup = held.states[0].setup
    if not held.is_stack:
        return gather_parts(setup, [flats[0]], placement, Placement.REPLICATED)[0]
    found = {setup.part(placement, rank).index: flat for rank, flat in enumerate(flats)}
    return torch.cat([found[index] for index in sorted(found)])


def restack(held: Held, states: list[Any]) -> TrainState:
    """Return this process's one state, or the stack of its virtual ranks' states."""
    if not held.is_stack:
        return states[0]
    stack: Any = optree.tree_map(lambda *xs: torch.stack(xs), *states, namespace=NAMESPACE)
    return stack


def _of_stack(state: Any, size: int) -> Held:
    def row(rank: int) -> Any:
        return optree.tree_map(
            lambda x: x[rank] if isinstance(x, Tensor) else x, state, namespace=NAMESPACE
        )

    ranks = tuple(range(size))
    return Held(axis=Axis(size=1), ranks=ranks, states=tuple(map(row, ranks)), is_stack=True)
