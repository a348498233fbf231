"""States on a part of a mesh: a checkpoint for each place along its other axes, "expert=1of4"."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from fzero.checkpoint._folders import PathLike, as_path
from fzero.checkpoint._held import held_by, stack_of, state_of_rank
from fzero.checkpoint.everywhere import CheckpointError, Ranks, everywhere, from_first
from fzero.checkpoint.manifest import MANIFEST
from fzero.collectives import assert_same_everywhere
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import TrainState

Do = Callable[[str, Any], Any]
"""(place, the state there, as one on ranks of its own) -> that state, or another."""


def is_in_places(thing: object) -> TypeGuard[TrainState]:
    """Whether a thing is a state that has other values at each place of its mesh."""
    return isinstance(thing, TrainState) and thing.mesh.mesh is not None


def in_each_place(name: str, state: TrainState, do: Do) -> TrainState:
    """Return the state of which `do` makes what is at each place. A collective of all the mesh.

    An error at one place is raised at all of them.
    """
    axis = state.mesh
    mesh = axis.mesh
    assert mesh is not None
    if tuple(state.step.shape) == (mesh.size,) and mesh.runtime is not Runtime.PROCESSES:
        return _of_stack(state, mesh, do)
    if mesh.runtime is Runtime.VIRTUAL:
        held_by(name, _on(state, mesh))  # it refuses the state of one virtual rank
    assert_same_everywhere([f"{name} at step {int(state.step)}"], mesh, what="the checkpoint")
    own = axis
    if axis.runtime is Runtime.PROCESSES:
        group = axis.group().group_name
        own = Axis(name=axis.name, size=axis.size, runtime=axis.runtime, group_name=group)
    made = everywhere(
        Ranks(axis=mesh),
        lambda: do(axis.place, _on(state, replace(own, mesh=None))),
        what=f"{name} the state at {axis.place}",
    )
    return _on(made, axis)


def _of_stack(state: TrainState, mesh: Axis, do: Do) -> TrainState:
    axis, ranks = state.mesh, dict[str, list[int]]()
    for rank in range(mesh.size):
        ranks.setdefault(axis.place_of(rank), []).append(rank)
    runtime = Runtime.LOCAL if axis.size == 1 else Runtime.VIRTUAL
    own = Axis(name=axis.name, size=axis.size, runtime=runtime)
    found: dict[int, Any] = {}
    for place, some in ranks.items():
        rows = [_on(state_of_rank(state, rank), own) for rank in some]
        made = do(place, rows[0] if axis.size == 1 else stack_of(rows))
        for k, rank in enumerate(some):
            found[rank] = _on(made if axis.size == 1 else state_of_rank(made, k), axis)
    return stack_of([found[rank] for rank in range(mesh.size)])


_PLACE = re.compile(r"[^=,]+=\d+of\d+(,[^=,]+=\d+of\d+)*")


def _of_other_meshes(where: Path, axis: Axis) -> list[str]:
    """Return the places in a folder that the mesh of a part does not have."""
    mesh = axis.mesh
    assert mesh is not None
    own = {axis.place_of(rank) for rank in range(mesh.size)}
    there = {one.parent.name for one in where.glob(f"*/{MANIFEST}")}
    return sorted(name for name in there - own if _PLACE.fullmatch(name))


def remove_others(where: Path, state: TrainState) -> None:
    """Remove the places of an earlier save on another mesh: all of this one have been written."""
    mesh = state.mesh.mesh
    assert mesh is not None

    def remove() -> None:
        for name in _of_other_meshes(where, state.mesh):
            (where / name / MANIFEST).unlink()
            shutil.rmtree(where / name, ignore_errors=True)

    alone = mesh.runtime is not Runtime.PROCESSES
    ranks = Ranks(axis=Axis(size=1) if alone else mesh)
    from_first(ranks, remove, what=f"remove the places of an earlier save in {where}")


def require_one_step(state: TrainState) -> TrainState:
    """Return a state as it was read; raise `CheckpointError` if its places are of other updates."""
    mesh = state.mesh.mesh
    assert mesh is not None
    steps = state.step.reshape(-1).tolist()
    if mesh.runtime is Runtime.PROCESSES:
        steps = Ranks(axis=mesh).tell(int(state.step))
    if len(set(steps)) > 1:
        found = {step: state.mesh.place_of(rank) for rank, step in enumerate(steps)}
        seen = " and ".join(f"{place} after {step} updates" for step, place in found.items())
        raise CheckpointError(
            f"load: a checkpoint of {seen}.",
            cause="a save that ended between two places, or paths of two checkpoints.",
            fix="load an older checkpoint, of which all places are there. Nothing was changed.",
        )
    return state


def folder_to_read(path: PathLike, axis: Axis, place: str) -> Path:
    """Return where a place is read from: its folder in `path`, or `path`, if that is a checkpoint.

    axis: the part of a mesh. Raises `CheckpointError` where neither is there, and where there are
    places of two meshes.
    """
    where = as_path("load", path)
    if (where / place).is_dir() and (others := _of_other_meshes(where, axis)):
        raise CheckpointError(
            f"load: there are {place} and {others} in {where}: which of them was saved last?",
            cause="a save on another mesh that was ended before it had removed those of this one.",
            fix="remove the folders of one mesh, or give the path of a place: "
            f'load(folder / "{place}", state).',
        )
    if (where / place).is_dir():
        return where / place
    if (where / MANIFEST).is_file():
        return where
    found = sorted(one.parent.name for one in where.glob(f"*/{MANIFEST}"))
    raise CheckpointError(
        f"load: there is no {place} in {where}, but {found or 'nothing'}.",
        cause="a state on a part of a mesh, saved on a mesh of another size along its other axes.",
        fix=f'give the path of a place: load(folder / "{(found or [place])[0]}", state), into one '
        "state for each of them.",
    )


def _on(state: Any, axis: Axis) -> Any:
    return state.replace(setup=replace(state.setup, axis=axis))
