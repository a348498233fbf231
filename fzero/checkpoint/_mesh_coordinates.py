"""States on a part of a mesh: a checkpoint for each place along its other axes, "expert=1of4".

    path/checkpoint-expert.json       names the data folder of all places: what was saved together
    path/expert=1of4/data-<id>/       with the manifest of this place in it
    path/expert=1of4/checkpoint.json  a copy of that manifest, for who has this folder alone

All places write; then one file is put in place, in one move; then each place is given its copy, and
what nothing names is removed. Places without such a file have been saved one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from fzero.checkpoint._process_states import local_states, stack_of, state_of_rank
from fzero.checkpoint.collective import CheckpointError, Ranks, from_first, run_on_all_ranks
from fzero.checkpoint.folders import (
    LOCK,
    Kind,
    PathLike,
    kept,
    locked,
    new_name,
    path_everywhere,
    put_sealed,
    put_text,
    read_text,
    remove_data,
    sweep,
    sync,
)
from fzero.checkpoint.manifest import (
    CHECKPOINT,
    MANIFEST,
    PLACE,
    Commit,
    commit_file,
    manifest_file,
    read_commit,
)
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
        local_states(name, _on(state, mesh))  # it refuses the state of one virtual rank
    assert_same_everywhere([f"{name} at step {int(state.step)}"], mesh, what="the checkpoint")
    own = axis
    if axis.runtime is Runtime.PROCESSES:
        group = axis.group().group_name
        own = Axis(name=axis.name, size=axis.size, runtime=axis.runtime, group_name=group)
    made = run_on_all_ranks(
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


def _all_ranks(axis: Axis) -> Ranks:
    """Return the processes of the whole mesh of a part."""
    mesh = axis.mesh
    assert mesh is not None
    return Ranks(axis=mesh if mesh.runtime is Runtime.PROCESSES else Axis(size=1))


def _places_of(axis: Axis) -> list[str]:
    assert axis.mesh is not None
    return sorted({axis.place_of(rank) for rank in range(axis.mesh.size)})


@contextmanager
def saved_together(path: PathLike, axis: Axis) -> Iterator[tuple[Path, str]]:
    """Give (folder, name of the data folder of each place), and commit what the block wrote there.

    A collective of all the mesh. If the block fails, on any rank, what was there still counts.
    """
    ranks, places = _all_ranks(axis), _places_of(axis)
    where = path_everywhere(ranks, "save", path)
    assert_same_everywhere([f"path {where}"], ranks.axis, what="the checkpoint")
    file, before = commit_file(where / places[0]), list[str]()

    def commit() -> None:
        before.extend((read_commit(where / places[0]) or Commit("", [])).places)
        for name in places:
            sync(where / name)
        through = where / places[0] / data / file.name
        put_sealed(file, "places", Commit(data, places)._asdict(), through=through)
        sync(where)

    try:
        with ExitStack() as until_written:

            def begin() -> str:
                until_written.enter_context(kept(where, makes=Kind(file.name, "data", str)))
                return new_name(CHECKPOINT)

            data = from_first(ranks, begin, what=f"make {where}")
            yield where, data
            from_first(ranks, commit, what=f"write {where}")
    finally:
        if ranks.axis.rank == 0 and where.is_dir():
            with locked(where, alone=True) as alone, suppress(OSError, CheckpointError):
                _tidy(where, places, before) if alone else None


def _tidy(where: Path, places: list[str], before: list[str]) -> None:
    """Give places their manifests, and remove what an earlier save has left: no more than that."""
    for name in places:
        own, copy = manifest_file(where / name), where / name / MANIFEST
        if own != copy and own.exists():
            put_text(copy, read_text(own), through=own.with_suffix(".copy"))
        sweep(where / name, CHECKPOINT)
    for name in {*before} - {*places}:  # of a mesh of other sizes, which this save has replaced
        (where / name / MANIFEST).unlink(missing_ok=True)
        remove_data(where / name, CHECKPOINT, "")
        (where / name / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # there is something of others in it
            (where / name).rmdir()


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


@contextmanager
def read_together(path: PathLike, axis: Axis) -> Iterator[Callable[[str], tuple[Path, str]]]:
    """Give place -> (where it is read, its data folder); "" where a place has its own manifest.

    A collective of all the mesh: all places are of one save, and stay for the time of the block.
    Raises `CheckpointError` where a place is not there, and where there are places of two meshes.
    """
    ranks, places = _all_ranks(axis), _places_of(axis)
    where = path_everywhere(ranks, "load", path)
    with ExitStack() as until_read:

        def begin() -> Commit | None:
            until_read.enter_context(kept(where))
            return read_commit(where / places[0])

        commit = from_first(ranks, begin, what=f"read {where}")

        def place_of(place: str) -> tuple[Path, str]:
            found = sorted(one.parent.name for one in where.glob(f"*/{MANIFEST}"))
            if commit is not None:
                if place in commit.places:
                    return where / place, commit.data
                found = commit.places
            elif (where / place).is_dir():
                if others := [x for x in found if x not in places and PLACE.fullmatch(x)]:
                    raise CheckpointError(
                        f"load: there are {place} and {others} in {where}: which of them was "
                        "saved last?",
                        cause="saves of an earlier version of fzero on two meshes.",
                        fix="remove the folders of one mesh, or give the path of a place: "
                        f'load(folder / "{place}", state).',
                    )
                return where / place, ""
            elif manifest_file(where).is_file():
                return where, ""
            raise CheckpointError(
                f"load: there is no {place} in {where}, but {found or 'nothing'}.",
                cause="a state on a part of a mesh, saved on a mesh of another size along its "
                "other axes.",
                fix=f'give the path of a place: load(folder / "{(found or [place])[0]}", state), '
                "into one state for each of them.",
            )

        yield place_of


def _on(state: Any, axis: Axis) -> Any:
    return state.replace(setup=replace(state.setup, axis=axis))
