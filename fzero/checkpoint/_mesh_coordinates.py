"""States on a part of a mesh: a checkpoint for each place along its other axes, "expert=1of4".

    path/checkpoint-expert.json       names the data folder of all places: what was saved together
    path/expert=1of4/data-<id>/       with the manifest of this place in it
    path/expert=1of4/checkpoint.json  a copy of that manifest, for who has this folder alone

All places write; then one file is put in place, in one move; then each place is given its copy, and
what nothing names is removed. Places without such a file have been saved one by one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fzero.checkpoint import folders, manifest
from fzero.checkpoint._process_states import local_states, stack_of, state_of_rank
from fzero.checkpoint.collective import CheckpointError, Ranks, from_first, run_on_all_ranks
from fzero.checkpoint.folders import Kind, PathLike
from fzero.checkpoint.manifest import Commit
from fzero.collectives import assert_same_everywhere
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import TrainState


def save_in_places(
    path: PathLike, state: TrainState, save: Callable[[Path, TrainState, str], None]
) -> None:
    """Save what is at each place, and commit all of it together. A collective of all the mesh.

    save: (folder of a place, its state, name of its data folder). If it fails, on any rank, what
    was there still counts.
    """
    ranks, places = _mesh_of(state)
    where = folders.shared_path(ranks, "save", path)
    file, before = manifest.commit_file(where / places[0]), list[str]()

    def save_place(place: str, one: TrainState) -> TrainState:
        save(where / place, one, data)
        return one

    def commit() -> None:
        before.extend((manifest.read_commit(where / places[0]) or Commit("", [])).places)
        folders.sync_files(where / name for name in places)
        through = where / places[0] / data / file.name
        folders.put_sealed(file, "places", Commit(data, places)._asdict(), through=through)
        folders.sync_files([where])

    def tidy() -> None:
        """Give places their manifests, and remove what an earlier save has left: no more."""
        for name in places:
            own, copy = manifest.manifest_file(where / name), where / name / manifest.MANIFEST
            if own != copy and own.exists():
                folders.put_text(copy, folders.read_text(own), through=own.with_suffix(".copy"))
            folders.sweep(where / name, manifest.CHECKPOINT)
        for name in {*before} - {*places}:  # of a mesh of other sizes, which this save has replaced
            (where / name / manifest.MANIFEST).unlink(missing_ok=True)
            folders.sweep(where / name, manifest.CHECKPOINT)
            (where / name / folders.LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # there is something of others in it
                (where / name).rmdir()

    try:
        with ExitStack() as until_written:

            def begin() -> str:
                until_written.enter_context(folders.kept(where, makes=Kind(file.name, "data", str)))
                return manifest.CHECKPOINT.data + f"-{secrets.token_hex(8)}"

            data = from_first(ranks, begin, what=f"make {where}")
            _in_each_place("save", state, save_place)
            from_first(ranks, commit, what=f"write {where}")
    finally:
        if ranks.axis.rank == 0 and where.is_dir():
            with folders.locked(where, alone=True) as alone, suppress(OSError, CheckpointError):
                tidy() if alone else None


def load_in_places(
    path: PathLike, state: TrainState, load: Callable[[Path, TrainState, str], TrainState]
) -> TrainState:
    """Return the state with what each place has read, all of one save. A collective of its mesh.

    load: (folder of a place, its state, name of its data folder; "" where it has a manifest of its
    own). All places stay until all have read.

    Raises `CheckpointError` where a place is not there, where there are places of two meshes, and
    where places are of other updates.
    """
    ranks, places = _mesh_of(state)
    where = folders.path_everywhere(ranks, "load", path)  # maybe another one at each place
    with ExitStack() as until_read:

        def begin() -> Commit | None:
            until_read.enter_context(folders.kept(where))
            return manifest.read_commit(where / places[0])

        commit = from_first(ranks, begin, what=f"read {where}")

        def load_place(place: str, one: TrainState) -> TrainState:
            found = sorted(other.parent.name for other in where.glob("*/" + manifest.MANIFEST))
            if commit is not None:
                if place in commit.places:
                    return load(where / place, one, commit.data)
                found = commit.places
            elif (where / place).is_dir():
                if others := [x for x in found if x not in places and manifest.PLACE.fullmatch(x)]:
                    raise CheckpointError(
                        f"load: there are {place} and {others} in {where}: which of them was "
                        "saved last?",
                        cause="saves of an earlier version of fzero on two meshes.",
                        fix="remove the folders of one mesh, or give the path of a place: "
                        f'load(folder / "{place}", state).',
                    )
                return load(where / place, one, "")
            elif manifest.manifest_file(where).is_file():
                return load(where, one, "")
            raise CheckpointError(
                f"load: there is no {place} in {where}, but {found or 'nothing'}.",
                cause="a state on a part of a mesh, saved on a mesh of another size along its "
                "other axes.",
                fix=f'give the path of a place: load(folder / "{(found or [place])[0]}", state), '
                "into one state for each of them.",
            )

        made = _in_each_place("load", state, load_place)
    steps = made.step.reshape(-1).tolist()
    if ranks.axis.size > 1:
        steps = ranks.tell(int(made.step))
    if len(set(steps)) > 1:
        of_steps = {step: made.mesh.place_of(rank) for rank, step in enumerate(steps)}
        seen = " and ".join(f"{place} after {step} updates" for step, place in of_steps.items())
        raise CheckpointError(
            f"load: a checkpoint of {seen}.",
            cause="a save that ended between two places, or paths of two checkpoints.",
            fix="load an older checkpoint, of which all places are there. Nothing was changed.",
        )
    return made


def _mesh_of(state: TrainState) -> tuple[Ranks, list[str]]:
    """Return the processes of the whole mesh of a state on a part of it, and all its places."""
    axis, mesh = state.mesh, state.mesh.mesh
    assert mesh is not None
    ranks = Ranks(axis=mesh if mesh.runtime is Runtime.PROCESSES else Axis(size=1))
    return ranks, sorted({axis.place_of(rank) for rank in range(mesh.size)})


def _in_each_place(
    name: str, state: TrainState, do: Callable[[str, TrainState], TrainState]
) -> TrainState:
    """Return the state of which `do` makes what is at each place. A collective of all the mesh.

    do: (place, the state there, as one on ranks of its own) -> that state, or another. An error at
    one place is raised at all of them.
    """
    axis, mesh = state.mesh, state.mesh.mesh
    assert mesh is not None
    if tuple(state.step.shape) == (mesh.size,) and mesh.runtime is not Runtime.PROCESSES:
        ranks_at = dict[str, list[int]]()
        for rank in range(mesh.size):
            ranks_at.setdefault(axis.place_of(rank), []).append(rank)
        runtime = Runtime.LOCAL if axis.size == 1 else Runtime.VIRTUAL
        own = Axis(name=axis.name, size=axis.size, runtime=runtime)
        found: dict[int, Any] = {}
        for place, ranks in ranks_at.items():
            rows = [_on(state_of_rank(state, rank), own) for rank in ranks]
            made = do(place, rows[0] if axis.size == 1 else stack_of(rows))
            for k, rank in enumerate(ranks):
                found[rank] = _on(made if axis.size == 1 else state_of_rank(made, k), axis)
        return stack_of([found[rank] for rank in range(mesh.size)])
    if mesh.runtime is Runtime.VIRTUAL:
        local_states(name, _on(state, mesh))  # it refuses the state of one virtual rank
    assert_same_everywhere([f"{name} at step {int(state.step)}"], mesh, what="the checkpoint")
    own, doing = replace(axis, mesh=None), f"{name} the state at {axis.place}"
    if axis.runtime is Runtime.PROCESSES:
        group = axis.group().group_name
        own = Axis(name=axis.name, size=axis.size, runtime=axis.runtime, group_name=group)
    run = lambda: do(axis.place, _on(state, own))  # noqa: E731
    return _on(run_on_all_ranks(Ranks(axis=mesh), run, what=doing), axis)


def _on(state: Any, axis: Axis) -> Any:
    return state.replace(setup=replace(state.setup, axis=axis))
