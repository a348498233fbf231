"""Axes of ranks: one process, the processes of a group, or virtual ranks in one process."""

from __future__ import annotations

import atexit
import datetime
import importlib
import os
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fzero._launch import attempt, describes_several_ranks, local_rank, timeout
from fzero.errors import AxisError, explain
from fzero.virtual import current_ranks

_RUNNING: list[Axis] = []
"""The axes of the steps that run now, so that `pmean(x)` in a loss needs no argument.

They are the process's, not a thread's: on a GPU a backward, and what it recomputes, runs in a
thread of autograd's own. Virtual ranks, which are threads, have one list each.
"""


class Runtime(Enum):
    """Where the ranks of an axis live."""

    LOCAL = "local"  # one rank, no communication
    PROCESSES = "processes"  # a torch.distributed process group
    VIRTUAL = "virtual"  # threads of this process, under `fzero.simulate`


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of `size` ranks. Holds no handle, so that it can live in a treespec.

    `rank` is looked up when it is asked for: the same record is right on every rank.

    Args:
        name: by which a collective may be told the axis: psum(x, "dp").
        size: the number of ranks, at least 1.
        runtime: where the ranks live.
        group_name: torch.distributed's name of the process group, for processes.

    Raises:
        AxisError: for fewer than one rank, and for several that nothing connects.

    Example:
        >>> axis = Axis(size=1)
        >>> axis.rank, axis.size
        (0, 1)
    """

    name: str = "dp"
    size: int
    runtime: Runtime = Runtime.LOCAL
    group_name: str = ""  # torch.distributed's name of the group, for PROCESSES

    def __post_init__(self) -> None:
        """Refuse a number of ranks that cannot be."""
        if self.size < 1 or (self.runtime is Runtime.LOCAL and self.size != 1):
            raise AxisError(
                explain(
                    f"Axis(size={self.size}, runtime={self.runtime}).",
                    cause="an axis made by hand; without communication there is one rank.",
                    fix="fzero.world() or a DeviceMesh for processes, fzero.simulate for virtual "
                    "ranks.",
                )
            )

    @property
    def rank(self) -> int:
        """This rank's index on the axis, in `range(size)`."""
        if self.runtime is Runtime.LOCAL:
            return 0
        if self.runtime is Runtime.PROCESSES:
            return dist.get_rank(self.group())
        ranks = current_ranks()
        if ranks is None or ranks.size != self.size:
            raise AxisError(
                explain(
                    f"{self} has {self.size} virtual ranks, and "
                    f"{'none run' if ranks is None else f'{ranks.size} run'} here.",
                    cause="a state made by `fzero.simulate(...).init` was used outside it, or "
                    "`backward()` was called on what `fzero.simulate` returned.",
                    fix="call `fzero.simulate(step, world_size=...)` with it, or make a state "
                    "with `step.init` for this world; differentiate inside the function.",
                )
            )
        return ranks.rank

    def group(self) -> dist.ProcessGroup:
        """Return the live process group, or raise `AxisError` when it is gone."""
        try:
            resolve: Any = dist.distributed_c10d._resolve_process_group
            return resolve(self.group_name)
        except (RuntimeError, ValueError, KeyError) as error:
            raise AxisError(
                explain(
                    f"the process group {self.group_name!r} of {self} does not exist.",
                    cause="torch.distributed was not started, or was shut down before this call.",
                    fix="start it under torchrun (fzero then joins by itself) or with "
                    "torch.distributed.init_process_group, and make the state after that.",
                )
            ) from error

    def __str__(self) -> str:
        return f"axis {self.name!r} ({self.runtime.value}, {self.size} ranks)"


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
        _start_group()
    everyone: Any = dist.group.WORLD
    return _axis_of_group(everyone)


def axis_of(mesh: DeviceMesh | Axis | None) -> Axis:
    """Return the axis that `mesh` means.

    Args:
        mesh: a DeviceMesh of one dim, whose name becomes the axis's; an axis; None for the world.

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
    if not isinstance(mesh, DeviceMesh):
        raise AxisError(
            explain(
                f"mesh is a {type(mesh).__name__}.",
                cause="a process group or a list of ranks was passed.",
                fix='pass a DeviceMesh: init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)).',
            )
        )
    if mesh.ndim != 1:
        raise AxisError(
            explain(
                f"mesh has {mesh.ndim} dims {mesh.mesh_dim_names}; one axis is supported.",
                cause="hybrid sharding (replicate x shard) was asked for.",
                fix='pass one dim of it, e.g. mesh["shard"].',
            )
        )
    if mesh.get_coordinate() is None:
        raise AxisError(
            explain(
                f"this process, rank {dist.get_rank()}, is not in the mesh {mesh.mesh.tolist()}.",
                cause="a mesh of some of the ranks, and code that all of them run.",
                fix="call this on the ranks of the mesh only, or give the others a mesh of theirs.",
            )
        )
    names = mesh.mesh_dim_names
    return _axis_of_group(mesh.get_group(), name=names[0] if names else "dp")


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
    ranks = dist.get_process_group_ranks(axis.group())
    local = len(ranks) < dist.get_world_size()  # only the ranks of the axis come here
    timeout = _timeout_of(axis.group())
    backend = backend or dist.get_backend_config(axis.group())  # torch's default: the world's
    group: Any = dist.new_group(
        ranks, timeout=timeout, backend=backend, use_local_synchronization=local
    )
    return _axis_of_group(group, name=axis.name)


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The timeout that a group was started with: torch gives a new one its default again."""
    for device in ("cpu", "cuda"):
        try:
            backend: Any = group._get_backend(torch.device(device))
            return backend.options._timeout
        except (RuntimeError, AttributeError):  # no such backend, or one without options
            continue
    return None


def ambient() -> Axis:
    """Return the axis of the step that runs now, or else the world."""
    running = _running()
    return running[-1] if running else world()


def enter(axis: Axis) -> None:
    """Make `axis` the ambient one."""
    _running().append(axis)


def leave() -> None:
    """Undo `enter`."""
    _running().pop()


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


def _start_group() -> None:
    # Its functions take the world as default argument when it is imported, as checkpoints do: if
    # that is after the start, the group outlives destroy_process_group, and a gloo thread that
    # then frees a tensor while the interpreter ends aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    limit = timeout(os.environ)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank(os.environ) % torch.cuda.device_count())
    again = attempt(os.environ)
    if again:
        # The launcher's store outlives its ranks. Without a prefix, a rank that was started again
        # finds the addresses of those that are gone, and connects to nobody.
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit)))
        store = dist.PrefixStore(f"attempt {again}", store)
        dist.init_process_group(
            _backends(on_gpu), store=store, rank=rank, world_size=size, timeout=limit
        )
    else:
        dist.init_process_group(_backends(on_gpu), timeout=limit)
    atexit.register(_stop_group)


def _backends(on_gpu: bool) -> str:
    """With GPUs both: what ranks agree on in passing goes over gloo, and syncs no device."""
    if not on_gpu:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if dist.is_gloo_available() else "nccl"


def _stop_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
