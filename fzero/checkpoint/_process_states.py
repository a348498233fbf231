"""What is saved or loaded: the states that this process holds, checked before anything runs.

And what their ranks alone know: replicas that train apart, and owners of named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from fzero.checkpoint._pieces import Texts
from fzero.checkpoint.collective import Ranks, on_ranks, results_of_ranks
from fzero.checkpoint.engine_state import Buffers, EngineLike, buffers_of, set_buffers
from fzero.checkpoint.manifest import named_texts
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.machine.offload import to_device, wait_for_copies
from fzero.machine.packing import gather_parts, unpack
from fzero.ranks.mesh import Axis, Runtime, refuse_part
from fzero.state import NAMESPACE, Phase, Placement, Setup, TrainState
from fzero.state.train_state import require_not_donated, stack_ranks
from fzero.transforms.donation import took
from fzero.transforms.state_entries import (
    APART,
    common_facts,
    is_owner,
    replica_facts,
    trains_apart,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStates:
    """A process has one rank's state; with virtual ranks, all of them (views of the stack)."""

    processes: Ranks  # that save or load together
    ranks: tuple[int, ...]
    states: tuple[TrainState, ...]
    engine: EngineLike | None = None  # that the state is of
    is_stack: bool = False  # all ranks are here, as fzero.simulate returns them

    buffers: Buffers = field(default_factory=Buffers)  # of the engine's module, by path

    @property
    def setup(self) -> Setup:
        """Of the state: the same on all ranks."""
        return self.states[0].setup

    @property
    def pairs(self) -> list[tuple[TrainState, int]]:
        """Each state with its rank."""
        return [*zip(self.states, self.ranks, strict=True)]

    def each(self, do: Callable[[int], T]) -> list[T]:
        """Return what `do(k)` returns on each of the ranks, where it may communicate."""
        return on_ranks(len(self.states), do) if self.is_stack else [do(0)]

    def returned(self, states: list[Any], buffers: Buffers) -> Any:
        """Return the new state; or the engine, into which it and its module's buffers go."""
        made = stack_of(states) if self.is_stack else states[0]
        if self.engine is None:
            return made
        self.engine.state = made
        if buffers:
            set_buffers(self.engine.module, buffers)
        return self.engine


def local_states(name: str, thing: Any, *, apart: bool = False) -> LocalStates:
    """Return what this process has of `thing`, a state or an engine.

    name: of the call. apart: whether it has room for replicas that train apart.

    Raises `LayoutError` for something else, `DonatedError` for a used-up state, `AxisError` inside
    `fzero.simulate` or without the state's process group.
    """
    state, engine = thing, None
    if not isinstance(thing, TrainState):
        state, engine = getattr(thing, "state", None), thing
    if not isinstance(state, TrainState):
        raise LayoutError(
            f"{name}: expected a TrainState or an Engine, got a {type(thing).__name__}.",
            cause="parameters, or a dict of several states, were passed.",
            fix=f"give each state a path of its own: checkpoint.{name}(path / name, state).",
        )
    took([state])
    axis = state.mesh
    if axis.mesh is not None:
        refuse_part(axis, name)
    if not apart and trains_apart(state):
        raise LayoutError(
            f"{name}: a state with local updates.",
            cause="replicas that train apart have parameters and optimizer states of their own; "
            f"{name} has room for those of one.",
            fix="fzero.checkpoint.save has all of them; load that into a state without local "
            "updates, which is at the anchors then. fzero.full_params(state) gives them, too.",
        )
    is_stack = tuple(state.step.shape) == (axis.size,)
    if not is_stack and axis.runtime is Runtime.VIRTUAL:
        raise AxisError(
            f"{name}: a state of one virtual rank.",
            cause=f"{name} was called inside fzero.simulate.",
            fix=f"call it outside, with the stacked state of all {axis.size} ranks that "
            "simulate(...).init or the simulated step returns.",
        )
    states = states_of_ranks(state, axis.size) if is_stack else (state,)
    for one in states:
        require_not_donated(one)
        tree: Any = one
        wait_for_copies(optree.tree_leaves(tree, namespace=NAMESPACE))
    return LocalStates(
        processes=Ranks(axis=Axis(size=1) if is_stack else axis),
        ranks=tuple(range(axis.size)) if is_stack else (axis.rank,),
        states=states,
        engine=engine,
        is_stack=is_stack,
        buffers={} if engine is None else buffers_of(engine.module),
    )


def require_idle(state: TrainState) -> None:
    """Raise `PhaseError` for a state with gradients: a checkpoint stands between two updates."""
    if state.phase is Phase.IDLE and not state.window.is_open and not state.progress.backwards:
        return
    window = "open" if state.window.is_open else "closed"
    raise PhaseError(
        f"save: the state is between gradient and update ({state.phase.value!r}, "
        f"{state.progress.backwards} backwards, window {window}).",
        cause="save was called inside a step, or before apply_gradients; or, under an engine, "
        "after a loss of several models of which one was not stepped.",
        fix="save the state that fzero.apply_gradients, or the whole step, returned; an engine "
        "after its step(), or after zero_grad() where its gradients are not wanted.",
    )


def require_closed(state: TrainState) -> None:
    """Raise `PhaseError` inside a coalescing window, which would lose its gradients."""
    if state.window.is_open or state.window.pending.held:
        raise PhaseError(
            "load: the state has an open coalescing window.",
            cause="load was called inside a coalesced step.",
            fix="load outside the step, into a state from init.",
        )


def whole_leaves(
    held: LocalStates, index: int, flats: Sequence[Tensor], placement: Placement
) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the leaf, whole values) of a group. A collective if it is cut.

    flats: what each of the held ranks has of the group, wherever it lives.
    """
    setup, layout = held.setup, held.setup.layout
    here = [to_device(x.detach(), one.device) for x, one in zip(flats, held.states, strict=True)]
    if held.is_stack:
        found = {setup.part(placement, rank).index: flat for rank, flat in enumerate(here)}
        flat = torch.cat([found[part] for part in sorted(found)])
    else:
        flat = gather_parts(setup, here, placement, Placement.REPLICATED)[0]
    yield from zip(layout.groups[index].leaves, unpack(layout, index, flat), strict=True)


def state_of_rank(stack: Any, rank: int) -> Any:
    """Return what one virtual rank has of a stacked state: views."""
    return optree.tree_map(
        lambda x: x[rank] if isinstance(x, Tensor) else x, stack, namespace=NAMESPACE
    )


def stack_of(states: Sequence[Any]) -> Any:
    """Return the stack of the states of all virtual ranks."""
    every: Any = [*states]
    wait_for_copies(optree.tree_leaves(every, namespace=NAMESPACE))
    return optree.tree_map(
        lambda *xs: stack_ranks(xs) if isinstance(xs[0], Tensor) else xs[0],
        *states,
        namespace=NAMESPACE,
    )


def states_of_ranks(stack: TrainState, size: int) -> tuple[TrainState, ...]:
    """Return the state of each virtual rank of a stacked one, as that rank has it: views.

    What owners keep in slots a stack shows on each rank; a rank has it where it is the owner.
    """
    setup = stack.setup
    owned = [name for name, slot in stack.slots.items() if slot.form.placement is Placement.OWNER]

    def of_rank(rank: int) -> TrainState:
        state: TrainState = state_of_rank(stack, rank)
        slots = dict(state.slots)
        for name in owned:
            kept = slots[name].value.items()
            owns = {key for key, _ in kept if is_owner(setup, key, rank % setup.axis.size)}
            values = {key: x if key in owns else x.new_empty(0) for key, x in kept}
            slots[name] = replace(slots[name], value=values)
        return state.replace(slots=slots) if owned else state

    return tuple(of_rank(rank) for rank in range(size))


def facts_of_replicas(held: LocalStates) -> dict[str, Any]:
    """Return what a manifest says of replicas that train apart; {} without. A collective."""
    first, ranks = held.states[0], held.setup.axis.size
    if not trains_apart(first):
        return {}
    own = [replica_facts(one) for one in held.states]
    told = own if held.is_stack else [one for some in held.processes.tell(own) for one in some]
    return {APART: common_facts(first, told[::ranks])}


def texts_of_ranks(held: LocalStates, *, what: str) -> list[Texts]:
    """Return what ranks alone know of named tensors, of all ranks. A collective.

    what: is being done, for an error.
    """

    def texts() -> list[Texts]:
        return [named_texts(*pair) for pair in held.pairs]

    return [x for some in results_of_ranks(held.processes, texts, what=what) for x in some]
