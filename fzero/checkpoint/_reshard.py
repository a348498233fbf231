"""`reshard`: a live state to another stage, or to other ranks, without a file."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fzero.checkpoint._process_states import held_by
from fzero.checkpoint.mesh_transition import (
    first_on_old,
    held_here,
    mesh_transition,
    moved,
    moved_stack,
    on_all,
)
from fzero.context.modes import for_training, in_transform, is_recorded, wants_graph
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.ranks.mesh import Axis, Mesh, MeshLike, Runtime, refuse_part
from fzero.state import TrainState
from fzero.state.train_state import require_not_donated
from fzero.transforms import simulate
from fzero.transforms.backward_pass import agree, reduce_agreed
from fzero.transforms.donation import returned, took
from fzero.transforms.init import check_stage


def reshard(
    state: TrainState | None, stage: int | None = None, mesh: MeshLike = None
) -> TrainState | None:
    """Return the same state at another stage, or on other ranks. A collective of both meshes.

    reshard(s) = load(save(s)), bit for bit, and no file is written: parameters, what the optimizer
    keeps, fp32 masters, counters, the loss scale, what a codec has lost (the residual), anchors of
    local updates. Reduced gradients stay, and those that wait in a window are reduced first, so it
    may be called between two gradients. The schedule of stage 3 is recorded anew. `state` stays as
    it is. A step from `fzero.shard` is made anew for another stage or mesh.

    All ranks of the larger mesh call it: one of the two has all ranks of the other. A rank outside
    of the old mesh passes None, and learns from a member what the state is; a rank outside of the
    new one gets None. A rank takes from itself what it has, and gets the rest in all-to-alls, each
    of one unit at most, the largest: beside the old parts and the new ones it holds what it
    sends and what it gets in one of them.

    Args:
        state: of this rank; None where the old mesh does not have it. With virtual ranks the stack
            of all of them, outside of `fzero.simulate`; or inside, where their number stays.
        stage: 0 to 3; None: as it is.
        mesh: as for `init`; None: as it is. Of virtual ranks, the sizes (replicas, shards), or
            names and sizes, of any number of ranks.

    Returns:
        The new state, or None.

    Raises:
        LayoutError: for options that the stage, or the mesh, cannot have; for a state that cannot
            be described to a rank without one, as its options have functions without a name.
        AxisError: if no mesh has all ranks of the other, or no rank has a state; if ranks ask for
            other stages or meshes.
        PhaseError: inside a transform of torch.func; between the gradient and the update of a
            step whose codec has a memory.
        DonatedError: for a used-up state.

    Example:
        >>> import torch, fzero
        >>> step = fzero.shard(lambda state: (state, None), stage=1)
        >>> init = fzero.simulate(step, world_size=2).init
        >>> state = init({"w": torch.arange(6.0)}, fzero.optim.adam(0.1))
        >>> whole = fzero.reshard(state, stage=3, mesh=(1, 3))
        >>> whole.stage, whole.params.flats[0].shape
        (3, torch.Size([3, 4]))
    """
    if state is not None and not isinstance(state, TrainState):
        raise LayoutError(
            f"reshard: expected a TrainState or None, got a {type(state).__name__}.",
            cause="an engine, parameters, or a pytree of states.",
            fix="call engine.reshard(...) of an engine, and reshard each state of a pytree.",
        )
    took([] if state is None else [state])
    refuse_part(None if state is None else state.mesh, "reshard")
    is_stack = state is not None and tuple(state.step.shape) == (state.mesh.size,)
    new = for_training(_of_stack if is_stack else _of_process, state, stage, mesh)
    if new is not None:
        returned([new])
    return new


def _of_process(state: TrainState | None, stage: int | None, mesh: MeshLike) -> TrainState | None:
    old = None if state is None else state.mesh
    where = mesh_transition(old, mesh)
    on_all(where.axis, lambda: _require(state, stage))
    state = first_on_old(where, old, lambda: None if state is None else _reduced(state))
    return moved(None if state is None else held_here(state), where, stage)


def _of_stack(state: Any, stage: int | None, mesh: MeshLike) -> TrainState:
    _require(state, stage)
    refuse_part(mesh, "reshard")
    mesh = state.mesh if mesh is None else mesh
    held = held_by("reshard", state, apart=True)
    if any(one.window.pending.held for one in held.states):
        reduced = simulate(_reduced, world_size=state.mesh.size)(state)
        held = held_by("reshard", reduced, apart=True)
    return moved_stack(held, stage, mesh, _size_of(state.mesh, mesh))


def _require(state: TrainState | None, stage: Any) -> None:
    """Raise for what is no stage, and for a state whose graph would be lost."""
    if stage is not None:
        check_stage(stage, "reshard")
    if state is None:
        return
    require_not_donated(state)
    flats = state.params.flats
    if in_transform() or is_recorded(flats) or wants_graph(flats):
        raise PhaseError(
            "reshard of a state that is differentiated, mapped or traced.",
            cause="a transform of torch.func, or a trace, around it; or updates that keep a graph.",
            fix="call it outside, between two steps.",
        )


def _reduced(state: TrainState) -> TrainState:
    """Return the state with all gradients of its ranks reduced, if any rank has some."""
    (agreed,) = agree("reshard()", [state])
    return reduce_agreed(state, agreed) if agreed.held else state


def _size_of(old: Axis, mesh: Any) -> int:
    """Return how many virtual ranks a mesh means."""
    virtual = isinstance(mesh, Axis) and (mesh.runtime is Runtime.VIRTUAL or mesh.size == 1)
    if virtual:
        return mesh.size
    if isinstance(mesh, Mapping | Mesh):
        named = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
        mesh = mesh if named.device_mesh is not None else (1, prod(n for _, n in named.axes))
    sizes = mesh if isinstance(mesh, tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise AxisError(
            f"reshard of the stacked state of {old.size} virtual ranks: mesh={mesh!r}.",
            cause="a mesh of processes, or a number of ranks.",
            fix="give its sizes, (replicas, shards): (1, 4) for 4 ranks in one dim; or names and "
            'sizes, {"data": 2, "seq": 2}.',
        )
    return prod(sizes)
