"""Which axis is meant: the world, what a user gives as a mesh, that of the running step."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fzero.context.here import current_ranks, is_abstract
from fzero.errors import AxisError
from fzero.ranks._groups import among, copy_of, start_world
from fzero.ranks._groups import holder_of_store as holder_of_store
from fzero.ranks._groups import when_started as when_started
from fzero.ranks._launch import describes_several_ranks
from fzero.ranks.axis import Axis as Axis
from fzero.ranks.axis import Dims
from fzero.ranks.axis import Runtime as Runtime

_RUNNING: list[Axis] = []
"""The axes of the steps that run now, so that `pmean(x)` in a loss needs no argument.

They are the process's, not a thread's: on a GPU a backward, and what it recomputes, runs in a
thread of autograd's own. Virtual ranks, which are threads, have one list each.
"""

MeshLike = DeviceMesh | Axis | tuple[int, int] | None
"""What a user gives as a mesh: see `axis_of`."""


def world() -> Axis:
    """Return the default axis: every rank that this program was started with.

    Inside `fzero.simulate` these are the virtual ranks; with a process group, its ranks. Without
    one, the group is started here (gloo for CPU tensors, and with GPUs nccl for CUDA tensors)
    under torchrun, and where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe several
    ranks; else one local rank. Collectives wait for `FZERO_TIMEOUT_S` seconds, 600 by default.

    Returns:
        The axis, named "dp". Where it starts the group, a collective.

    Raises:
        AxisError: where srun or mpirun started several processes, and the variables that say how
            they find each other are not all set; for a variable that is no number.

    Example:
        >>> world().size
        1
    """
    ranks = current_ranks()
    if ranks is not None:
        return Axis(size=ranks.size, runtime=Runtime.VIRTUAL if ranks.size > 1 else Runtime.LOCAL)
    if not dist.is_available():
        return Axis(size=1)
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched() and not describes_several_ranks(os.environ):
            return Axis(size=1)
        start_world()
    everyone: Any = dist.group.WORLD
    return _axis_of_group(everyone)


def axis_of(mesh: MeshLike) -> Axis:
    """Return the axis that `mesh` means.

    Args:
        mesh: None for the world; a DeviceMesh of one dim, whose name becomes the axis's, or of two,
            (replicate, shard); their sizes (R, S), for a world of R S ranks; an axis.

    Raises:
        AxisError: for anything else, and on a rank that is not in the mesh.

    Example:
        >>> axis_of(None).size, axis_of(Axis(name="shard", size=1)).name
        (1, 'shard')
    """
    if mesh is None:
        return world()
    if isinstance(mesh, Axis):
        return mesh
    if isinstance(mesh, tuple):
        return _axis_of_sizes(mesh)
    axis = _axis_of_mesh(_device_mesh(mesh))
    return axis.as_virtual() if is_abstract() else axis


def _device_mesh(mesh: object) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise AxisError(
            f"mesh is a {type(mesh).__name__}.",
            cause="a process group or a list of ranks was passed.",
            fix='pass a DeviceMesh, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), or '
            "the sizes (replicas, shards) of the world's two dims.",
        )
    return mesh


def _listed(ranks: Any) -> Any:
    """Return a tensor of ranks as lists in lists, one for each dim."""
    return ranks.tolist()


def _axis_of_mesh(mesh: DeviceMesh) -> Axis:
    if mesh.get_coordinate() is None:
        raise AxisError(
            f"this process, rank {dist.get_rank()}, is not in the mesh {_listed(mesh.mesh)}.",
            cause="a mesh of some of the ranks, and code that all of them run.",
            fix="call this on the ranks of the mesh only, or give the others a mesh of theirs.",
        )
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return _axis_of_group(mesh.get_group(), name=names[0] if names else "dp")
    ranks: list[int] = _listed(mesh.mesh.flatten())
    if mesh.ndim != 2 or ranks != sorted(ranks):
        raise AxisError(
            f"mesh has {mesh.ndim} dims {names} of the ranks {_listed(mesh.mesh)}.",
            cause="a mesh with dims of other kinds of parallelism, or with ranks in another order.",
            fix='pass one dim of it, mesh["shard"], or two, mesh["replicate", "shard"], with '
            "the ranks in ascending order, so that those of a replica follow each other.",
        )
    if mesh.size(0) == 1:
        return _axis_of_group(mesh.get_group(1), name=names[1] if names else "dp")
    dims = Dims(mesh.size(0), (names[0], names[1])) if names else Dims(mesh.size(0))
    name = "_".join(dims.names) if "dp" in dims.names else "dp"  # another one than the dims have
    return replace(_axis_of_group(among(ranks, mesh.get_group(1)), name=name), dims=dims)


def _axis_of_sizes(sizes: tuple[Any, ...]) -> Axis:
    """Return the axis of the world, in two dims."""
    axis = world()
    counts = [type(size) is int and size > 0 for size in sizes]
    if counts != [True, True] or sizes[0] * sizes[1] != axis.size:
        raise AxisError(
            f"mesh={sizes!r}, and there are {axis.size} ranks.",
            cause="another number of ranks than the program was written for, or more dims.",
            fix="give (replicas, shards) with replicas x shards = ranks, here e.g. "
            f"(1, {axis.size}); for some of the ranks only, a DeviceMesh.",
        )
    return axis if sizes[0] == 1 else replace(axis, dims=Dims(sizes[0]))


def mesh_of_replicas(mesh: MeshLike) -> Axis:
    """Return the axis that `mesh` means, in two dims; one dim is replicas of one rank each."""
    axis = axis_of(mesh)
    if axis.dims is not None or axis.size == 1:
        return axis
    two = isinstance(mesh, tuple) or (isinstance(mesh, DeviceMesh) and mesh.ndim == 2)
    return replace(axis, dims=Dims(1 if two else axis.size))


def of_replica(mesh: Axis) -> Axis:
    """Return the axis of the ranks of this replica, which then know of no others.

    A collective at first: the ranks of the mesh make the groups of both dims.
    """
    if mesh.replicas.runtime is Runtime.PROCESSES:
        mesh.replicas.group()
    own = mesh.shards
    if own.runtime is not Runtime.PROCESSES or own.whole is None:
        return own
    return Axis(
        name=own.name, size=own.size, runtime=own.runtime, group_name=own.group().group_name
    )


def own_group(axis: Axis, *, backend: str | None = None) -> Axis:
    """Return an axis of the same ranks with a process group of its own. All of them call it.

    What goes over it has an order of its own: two engines under one loss, or a user's own
    collectives, may come in another order on each rank. `backend` is that of `axis` by default.
    """
    if axis.runtime is Runtime.LOCAL:
        return axis
    here = current_ranks()
    if here is not None:
        # Their collectives have one order for all: the name only tells whose came where.
        number = here.kept[own_group] = here.kept.get(own_group, 0) + 1
        return replace(axis, group_name=f"group {number}")
    return replace(axis, group_name=copy_of(axis.group(), backend).group_name)


def ambient() -> Axis:
    """Return the axis of the step that runs now, or else the world."""
    running = _running()
    return running[-1] if running else world()


@contextmanager
def running_on(axis: Axis) -> Generator[None, None, None]:
    """Make `axis` the ambient one in this block."""
    running = _running()
    running.append(axis)
    try:
        yield
    finally:
        running.pop()


def _running() -> list[Axis]:
    here = current_ranks()
    return _RUNNING if here is None else here.kept.setdefault(_running, [])


def axis_index() -> int:
    """Return r, this rank's index on the ambient axis: that of the step that runs, else the world.

    Returns:
        An int in range(axis_size()).

    Raises:
        AxisError: where the axis is not here, e.g. virtual ranks outside of `fzero.simulate`.

    Example:
        >>> axis_index()
        0
    """
    return ambient().rank


def axis_size() -> int:
    """Return W, the number of ranks on the ambient axis: of the step that runs, else the world.

    Returns:
        An int, at least 1.

    Raises:
        AxisError: as `world` does, where no step runs.

    Example:
        >>> axis_size()
        1
    """
    return ambient().size


def _axis_of_group(group: dist.ProcessGroup, name: str = "dp") -> Axis:
    size = dist.get_world_size(group)
    alone = os.environ.get("FZERO_ONE_RANK_GROUP") != "1"  # set it to try a backend on one rank
    if size == 1 and alone:  # nothing to say to anybody: the local axis spends no collective
        return Axis(name=name, size=1)
    return Axis(name=name, size=size, runtime=Runtime.PROCESSES, group_name=group.group_name)
