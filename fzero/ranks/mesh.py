"""Which ranks there are: axes and meshes, the world, and those of the running step.

An axis is a record of some ranks: one process, the processes of a group, or virtual ranks. One of
two dims has R replicas of S shards each: rank r S + s is in replica r, and has shard s. Its parts
are axes as well: `shards`, the ranks of one replica, and `replicas`, those of one shard. A mesh of
named axes counts its ranks with the last axis fastest; `along` gives the part of a name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import get_worker_info

from fzero.context.current_rank import (
    current_ranks,
    in_forked_child,
    is_abstract,
    refuse_stray_thread,
    was_forked,
)
from fzero.errors import AxisError
from fzero.ranks.process_groups import (
    among,
    copy_of,
    is_of_parent,
    part_of_group,
    resolve,
    start_world,
)
from fzero.ranks.process_groups import holder_of_store as holder_of_store
from fzero.ranks.process_groups import when_started as when_started
from fzero.ranks.rendezvous import describes_several_ranks

T = TypeVar("T")


class Runtime(Enum):
    """Where the ranks of an axis live."""

    LOCAL = "local"  # one rank, no communication
    PROCESSES = "processes"  # a torch.distributed process group
    VIRTUAL = "virtual"  # threads of this process, under `fzero.simulate`


class Dims(NamedTuple):
    """The two dims of an axis."""

    replicas: int
    names: tuple[str, str] = ("replicate", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of `size` ranks. Holds no handle, so that it can live in a treespec.

    `rank` is looked up when it is asked for: the same record is right on every rank.

    Args:
        name: by which a collective may be told the axis: psum(x, "dp").
        size: the number of ranks, at least 1.
        runtime: where the ranks live.
        group_name: torch.distributed's name of the process group, for processes.
        dims: of an axis of two dims, how many replicas there are, and the names of the dims.
        named: of a mesh of named axes, the name and the size of each, the last one fastest.
        whole: of a part, the axis of all ranks.
        stride: of a part, how far its ranks are apart on the whole.
        mesh: of a part that states are on (`Mesh.__getitem__`), all ranks of its mesh by name: the
            mean of a loss is over those.

    Raises:
        AxisError: for fewer than one rank, for several that nothing connects, for a number of
            replicas that does not divide them, and for named axes of another number of ranks.

    Example:
        >>> axis = Axis(size=1)
        >>> axis.rank, axis.size
        (0, 1)
    """

    name: str = "dp"
    size: int
    runtime: Runtime = Runtime.LOCAL
    group_name: str = ""  # torch.distributed's name of the group, for PROCESSES
    dims: Dims | None = None
    whole: Axis | None = None
    stride: int = 1
    named: tuple[tuple[str, int], ...] = ()
    mesh: Axis | None = None

    def __post_init__(self) -> None:
        """Refuse a number of ranks that cannot be."""
        uneven = self.dims is not None and self.size % max(self.dims.replicas, 1)
        uneven = uneven or (self.named and math.prod(n for _, n in self.named) != self.size)
        if self.size < 1 or uneven or (self.runtime is Runtime.LOCAL and self.size != 1):
            raise AxisError(
                f"Axis(size={self.size}, runtime={self.runtime}, dims={self.dims}).",
                cause="an axis made by hand; without communication there is one rank.",
                fix="fzero.world() or a DeviceMesh for processes, fzero.simulate for virtual "
                "ranks.",
            )

    @property
    def rank(self) -> int:
        """This rank's index on the axis, in `range(size)`."""
        if self.whole is not None:
            return self.whole.rank // self.stride % self.size
        if self.runtime is Runtime.LOCAL:
            return 0
        if self.runtime is Runtime.PROCESSES:
            return self._group().rank()
        ranks = current_ranks()
        if ranks is None or ranks.size != self.size:
            refuse_stray_thread()
            raise AxisError(
                f"{self} has {self.size} virtual ranks, and "
                f"{'none run' if ranks is None else f'{ranks.size} run'} here.",
                cause="a state made by `fzero.simulate(...).init` was used outside it, or "
                "`backward()` was called on what `fzero.simulate` returned.",
                fix="call `fzero.simulate(step, world_size=...)` with it, or make a state "
                "with `step.init` for this world; differentiate inside the function.",
            )
        return ranks.rank

    @property
    def place(self) -> str:
        """Where this rank is along the axes of the mesh that a part does not have: "expert=1of2".

        "" for what is no part.

        Example:
            >>> import fzero
            >>> experts = fzero.Mesh({"data": 2, "expert": 2})["data"]
            >>> def in_second():
            ...     return experts.axis.place == "expert=1of2"
            >>> fzero.simulate(in_second, world_size=4)()
            tensor([False,  True, False,  True])
        """
        return "" if self.mesh is None else self.place_of(self.mesh.rank)

    def place_of(self, rank: int) -> str:
        """Return where a rank of the mesh is along the axes that this part does not have."""
        own, found = {self.name, *dict(self.named)}, list[str]()
        for name, size in reversed(() if self.mesh is None else self.mesh.named):
            rank, at = divmod(rank, size)
            found += [] if name in own else [f"{name}={at}of{size}"]
        return ",".join(reversed(found))

    def joined(self, names: Sequence[str]) -> Axis:
        """Return the part of some named axes that follow each other, which knows its mesh."""
        order = [name for name, _ in self.named]
        begin, end = order.index(names[0]), order.index(names[-1]) + 1
        kept, behind = self.named[begin:end], self.named[end:]
        size, stride = (math.prod(n for _, n in some) for some in (kept, behind))
        part = self._part("_".join(names), size, stride)
        return replace(part, mesh=self, named=kept if len(kept) > 1 else ())

    @property
    def shards(self) -> Axis:
        """The ranks of this replica, over which values are sharded: all, if there is one dim."""
        if self.dims is None:
            return self
        replicas, names = self.dims
        return self._part(names[1], self.size // replicas, 1)

    @property
    def replicas(self) -> Axis:
        """The ranks that have the same shards as this one: itself alone, if there is one dim."""
        if self.dims is None:
            return _ALONE
        replicas, names = self.dims
        return self._part(names[0], replicas, self.size // replicas)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a collective may be told: that of the axis itself, then those of parts."""
        parts = () if self.dims is None else self.dims.names
        return tuple(dict.fromkeys([self.name, *(name for name, _ in self.named), *parts]))

    def has_places_of(self, other: Axis) -> bool:
        """Whether both are the same ranks in the same order, by whatever name.

        Example:
            >>> import fzero
            >>> mesh = fzero.Mesh({"data": 2, "seq": 2})
            >>> def compared():
            ...     data = mesh["data"].axis
            ...     return [data.has_places_of(mesh.axis.along(name)) for name in ("data", "seq")]
            >>> fzero.simulate(compared, world_size=4)()
            [tensor([True, True, True, True]), tensor([False, False, False, False])]
        """
        return self == other or self._places() == other._places()

    def _places(self) -> tuple[Any, ...]:
        root, stride = self, 1
        while root.whole is not None:
            root, stride = root.whole, root.stride * stride
        processes = root.runtime is Runtime.PROCESSES
        ranks: Any = dist.get_process_group_ranks(root.group()) if processes else root.size
        return root.runtime, ranks, self.size, stride

    def along(self, name: str, *, who: str = "") -> Axis:
        """Return the axis of that name, with the ranks that differ from this one in it alone.

        `who` is said first in an error. Raises `AxisError` for a name that the mesh has not.

        Example:
            >>> import fzero
            >>> def place():
            ...     seq = fzero.Mesh({"data": 2, "seq": 2}).axis.along("seq")
            ...     return seq.rank + 10 * seq.size
            >>> fzero.simulate(place, world_size=4)()
            tensor([20, 21, 20, 21])
        """
        if name == self.name:
            return self
        stride = 1
        for other, size in reversed(self.named):
            if other == name:
                return self._part(name, size, stride)
            stride *= size
        # All ranks in one dim are one replica: what is written for (R, S) runs on (1, W) as well.
        dims = self.dims or Dims(1)
        if name in dims.names and (self.dims is not None or not self.named):
            return (self.replicas, self.shards)[dims.names.index(name)]
        raise AxisError(
            f"{who}{': ' if who else ''}axis={name!r}, and the axis here is {self}.",
            cause="the name of another mesh dim, or a mesh or a group in place of an axis; or a "
            "call outside of the step, where no mesh is known by its names.",
            fix=f"leave it out, write {' or '.join(map(repr, self.names))}, or pass an fzero.Axis, "
            f"as `fzero.Mesh(...).axis.along({name!r})`.",
        )

    def as_virtual(self) -> Axis:
        """The same ranks as virtual ones: what a trace, or a plan, knows them as."""
        runtime = Runtime.LOCAL if self.size == 1 else Runtime.VIRTUAL
        whole, mesh = self.whole and self.whole.as_virtual(), self.mesh and self.mesh.as_virtual()
        return replace(self, runtime=runtime, group_name="", whole=whole, mesh=mesh)

    @property
    def plain(self) -> Axis:
        """The same ranks, in one dim."""
        return replace(self, dims=None, named=(), mesh=None)

    def _part(self, name: str, size: int, stride: int) -> Axis:
        if size == 1:
            return Axis(name=name, size=1)
        whole = self.plain
        return replace(whole, name=name, size=size, whole=whole, stride=stride)

    def first(self, rank: int) -> int:
        """Return which rank of the whole is the first one of the part that `rank` is in."""
        return rank - rank // self.stride % self.size * self.stride

    def parts(self, everyone: Sequence[T]) -> dict[int, list[T]]:
        """Cut one value for each rank of the whole into parts: {`first` of it: its values}."""
        firsts = {self.first(rank) for rank in range(len(everyone))}
        span = self.size * self.stride
        return {first: list(everyone[first : first + span : self.stride]) for first in firsts}

    def group(self) -> dist.ProcessGroup:
        """Return the live process group, to communicate over it.

        Raises `AxisError` when it is gone, and in a process that was forked from a rank.
        """
        if self.whole is not None:
            return part_of_group(self.whole.group(), size=self.size, stride=self.stride)
        group = self._group()
        if is_of_parent(group):
            raise in_forked_child(f"a collective over {self}", f"rank {group.rank()}")
        return group

    def _group(self) -> dist.ProcessGroup:
        try:
            return resolve(self.group_name)
        except (RuntimeError, ValueError, KeyError) as error:
            refuse_stray_thread()
            raise AxisError(
                f"the process group {self.group_name!r} of {self} does not exist.",
                cause="torch.distributed was not started, or was shut down before this call.",
                fix="start it under torchrun (fzero then joins by itself) or with "
                "torch.distributed.init_process_group, and make the state after that.",
            ) from error

    def __str__(self) -> str:
        if self.mesh is not None:
            return f"axis {self.name!r} ({self.runtime.value}, {self.size} ranks) of {self.mesh}"
        if self.named:
            sizes = " x ".join(f"{name} {size}" for name, size in self.named)
            copies = "" if self.dims is None else f" in {self.dims.replicas} replicas"
            return f"axis {self.name!r} ({self.runtime.value}, {sizes} ranks{copies})"
        dims = "" if self.dims is None else f"{self.dims.replicas} x "
        size = self.size if self.dims is None else self.size // self.dims.replicas
        return f"axis {self.name!r} ({self.runtime.value}, {dims}{size} ranks)"


_ALONE = Axis(size=1)


P = ParamSpec("P")
R = TypeVar("R")

_TORCH: Any = torch
"""What torch has no public name for."""

_RUNNING: list[tuple[Axis, ...]] = []
"""The axes of the steps that run now, so that `pmean(x)` in a loss needs no argument: of each step
those of its states.

They are the process's, not a thread's: on a GPU a backward, and what it recomputes, runs in a
thread of autograd's own. Virtual ranks, which are threads, have one list each.
"""


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """A mesh of named axes: how many ranks along each, and which of them hold copies.

    Ranks are counted with the last axis fastest: of {"data": 2, "seq": 4} rank 5 is at data 1 and
    seq 1, and ranks 4 to 7 are one line along "seq". Keep those that talk most next to each other.

    States are sharded over all axes, whatever a loss does along them, for parameters are the same
    at every place. `replicate` names the axes along which ranks hold copies of the shards (hybrid
    sharding): they come first, and a gradient is reduced over the others, then over them.

    Args:
        axes: {name: size}, of which the product is the number of ranks; or a DeviceMesh of which
            each dim has a name, with its ranks in ascending order.
        replicate: a name, or names.

    Raises:
        AxisError: for names or sizes that cannot be, and for axes in `replicate` that do not come
            first; where it is used, for another number of ranks.

    Example:
        >>> import torch, fzero
        >>> mesh = fzero.Mesh({"data": 2, "seq": 2})
        >>> def loss(p, x):
        ...     return fzero.psum((p["w"] * x).sum(), axis="seq")
        >>> def step_fn(state, x):
        ...     state, value = fzero.grad_and_reduce(loss, state)(x)
        ...     return fzero.apply_gradients(state), value
        >>> step = fzero.simulate(fzero.shard(step_fn, stage=3, mesh=mesh), world_size=4)
        >>> state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1))
        >>> step(state, torch.tensor([[1.0], [2.0], [3.0], [4.0]]))[1]
        tensor([ 6.,  6., 14., 14.])
    """

    axes: tuple[tuple[str, int], ...]
    replicate: tuple[str, ...]
    device_mesh: DeviceMesh | None
    whole: Mesh | None  # of a part, mesh["data"], the mesh

    def __init__(
        self, axes: Mapping[str, int] | DeviceMesh, *, replicate: str | Sequence[str] = ()
    ) -> None:
        """Check the names and the sizes."""
        put = partial(object.__setattr__, self)
        put("device_mesh", axes if isinstance(axes, DeviceMesh) else None)
        put("whole", None)
        put("axes", _named_axes(axes))
        put("replicate", (replicate,) if isinstance(replicate, str) else tuple(replicate))
        names = [name for name, _ in self.axes]
        if self.replicate == () or sorted(self.replicate) == sorted(names[: len(self.replicate)]):
            return
        unknown = [name for name in self.replicate if name not in names]
        first = {**dict.fromkeys(self.replicate), **dict.fromkeys(names)}
        raise AxisError(
            f"replicate={self.replicate} on a mesh of the axes {names}.",
            cause=f"{unknown} is no axis of the mesh."
            if unknown
            else "the ranks of one replica must follow each other, so the axes that hold copies "
            "come first.",
            fix=f"name some of {names}." if unknown else f"give the axes as {[*first]}.",
        )

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """Return the part of some axes: what a state is on of which the others have other values.

        `mesh["data"]` of {"data": 2, "expert": 4} is 4 lines of 2 ranks, one for each place along
        "expert". A state on it has 2 shards, and each line has values of its own. The mean of a
        loss is over all ranks of the mesh all the same.

        Args:
            names: of an axis, or of several that follow each other, in their order.

        Raises:
            AxisError: for other names, and for a mesh with `replicate`.

        Example:
            >>> import fzero
            >>> fzero.Mesh({"data": 2, "expert": 4})["data"]
            Mesh({'data': 2, 'expert': 4})['data']
        """
        asked = tuple(names) if isinstance(names, tuple | list) else (names,)
        order = tuple(name for name, _ in self.axes)
        starts = order.index(asked[0]) if asked and asked[0] in order else 0
        if asked != order[starts : starts + len(asked)] or not asked or self.replicate:
            raise AxisError(
                f"{self}[{', '.join(map(repr, asked))}].",
                cause="a part of a mesh in which some axes hold copies."
                if self.replicate
                else "a number, the name of another mesh's axis, or axes that do not follow each "
                "other.",
                fix="leave replicate= out, and take stage 0 for what all ranks shall hold."
                if self.replicate
                else f"name axes of {[*order]} in this order, without one left out between them.",
            )
        if asked == order:
            return self
        part = Mesh(dict(self.axes[starts : starts + len(asked)]))
        object.__setattr__(part, "whole", self.whole or self)
        return part

    @property
    def axis(self) -> Axis:
        """The ranks, as those that run here know them: `mesh.axis.along("seq").rank`.

        A collective at first, where fzero starts the process group.
        """
        return axis_of(self)

    def __repr__(self) -> str:
        """Return it as it is written."""
        if self.whole is not None:
            return f"{self.whole}[{', '.join(repr(name) for name, _ in self.axes)}]"
        copies = f", replicate={self.replicate}" if self.replicate else ""
        return f"Mesh({dict(self.axes)}{copies})"


MeshLike = Mesh | DeviceMesh | Axis | Mapping[str, Any] | tuple[int, int] | None
"""What a user gives as a mesh: see `axis_of`. (A mapping has sizes, or the meshes of models.)"""


def _named_axes(axes: Any) -> tuple[tuple[str, int], ...]:
    found: list[tuple[Any, Any]] = []
    if isinstance(axes, DeviceMesh):
        found = [(name, axes.size(dim)) for dim, name in enumerate(axes.mesh_dim_names or ())]
    elif isinstance(axes, Mapping):
        found = [*cast("Mapping[Any, Any]", axes).items()]
    good = [type(name) is str and name and type(n) is int and n > 0 for name, n in found]
    if found and all(good):
        return tuple(found)
    raise AxisError(
        f"a mesh of the axes {found or axes}.",
        cause="a size below 1, no axis at all, or a DeviceMesh without names.",
        fix='give names and sizes, {"data": 2, "seq": 4}, or '
        'init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "seq")).',
    )


def names_of_mesh(mesh: MeshLike, ranks: int) -> Mesh | None:
    """Return the names and sizes of a mesh, for so many ranks of any kind; None if it has not both.

    Example:
        >>> names_of_mesh({"data": 2, "seq": 2}, 4), names_of_mesh({"data": 2, "seq": 2}, 8)
        (Mesh({'data': 2, 'seq': 2}), None)
    """
    if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names:
        mesh = Mesh(mesh, replicate=mesh.mesh_dim_names[:-1])
    elif isinstance(mesh, Mapping) and all(type(size) is int for size in mesh.values()):
        mesh = Mesh(mesh)
    if not isinstance(mesh, Mesh):
        return None
    whole = mesh.whole or mesh
    if math.prod(size for _, size in whole.axes) != ranks:
        return None
    made = Mesh(dict(whole.axes), replicate=whole.replicate)
    return made[tuple(name for name, _ in mesh.axes)] if mesh.whole else made


def outside_of_graphs(fn: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile call a function as it is, between two graphs.

    In a graph it would trace which ranks there are, and the first call makes groups of them.
    """
    made: Callable[P, R] = _TORCH._disable_dynamo(fn)
    return made


def world() -> Axis:
    """Return the default axis: every rank that this program was started with.

    Inside `fzero.simulate` these are the virtual ranks; with a process group, its ranks. Without
    one, the group is started here (gloo, and the backend that torch knows for the accelerator)
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
    refuse_stray_thread()
    if not dist.is_available():
        return Axis(size=1)
    if not dist.is_initialized():
        if get_worker_info() is not None and (
            not was_forked() or describes_several_ranks(os.environ)
        ):
            raise AxisError(
                f"ranks are asked for in worker {os.getpid()} of a DataLoader, which does not know "
                "them.",
                cause="axis_index() or a collective in a Dataset or a collate_fn, in a worker that "
                "was spawned, or that was forked before the ranks met.",
                fix="ask in the process of the rank, and give the Dataset the number; call "
                "collectives on what it returns. For a state of the worker alone: "
                "mesh=fzero.Axis(size=1).",
            )
        if not dist.is_torchelastic_launched() and not describes_several_ranks(os.environ):
            return Axis(size=1)
        start_world()
    everyone: Any = dist.group.WORLD
    return _axis_of_group(everyone)


def axis_of(mesh: MeshLike) -> Axis:
    """Return the axis that `mesh` means.

    Args:
        mesh: None for the world; named axes of the world, {"data": 2, "seq": 4}, or a `Mesh`; a
            DeviceMesh of one dim, whose name becomes the axis's, or of two, (replicate, shard),
            with its ranks in ascending order; their sizes (R, S), for a world of R S ranks, of
            which (1, W) is the world; an axis.

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
    if isinstance(mesh, Mapping | Mesh):
        return _axis_of_names(mesh if isinstance(mesh, Mesh) else Mesh(mesh))
    if isinstance(mesh, tuple):
        axis, counts = world(), [type(size) is int and size > 0 for size in mesh]
        if counts != [True, True] or mesh[0] * mesh[1] != axis.size:
            raise AxisError(
                f"mesh={mesh!r}, and there are {axis.size} ranks.",
                cause="another number of ranks than the program was written for, or more dims.",
                fix="give (replicas, shards) with replicas x shards = ranks, here e.g. "
                f"(1, {axis.size}); for some of the ranks only, a DeviceMesh.",
            )
        return axis if mesh[0] == 1 else replace(axis, dims=Dims(mesh[0]))
    if not isinstance(cast("object", mesh), DeviceMesh):
        raise AxisError(
            f"mesh is a {type(mesh).__name__}.",
            cause="a process group or a list of ranks was passed.",
            fix='pass a DeviceMesh, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), the '
            "sizes (replicas, shards) of the world's two dims, or names and sizes, "
            '{"data": 2, "seq": 2}.',
        )
    names, ranks = mesh.mesh_dim_names, _ranks_of(mesh, dims=2)
    if mesh.ndim == 1:
        axis = _axis_of_group(mesh.get_group(), name=names[0] if names else "dp")
    elif mesh.size(0) == 1:
        axis = _axis_of_group(mesh.get_group(1), name=names[1] if names else "dp")
        axis = replace(axis, named=tuple(zip(names, mesh.shape, strict=True)) if names else ())
    else:
        dims = Dims(mesh.size(0), (names[0], names[1])) if names else Dims(mesh.size(0))
        name = "_".join(dims.names) if "dp" in dims.names else "dp"  # another one than dims have
        axis = replace(_axis_of_group(among(ranks, mesh.get_group(1)), name=name), dims=dims)
    return axis.as_virtual() if is_abstract() else axis


def _ranks_of(mesh: DeviceMesh, *, dims: int | None = None) -> list[int]:
    """Return the ranks of a mesh, in order. dims: how many it may have.

    Raises `AxisError` on a rank that is not in it, and where they are in another order.
    """
    listed: Any = mesh.mesh
    if mesh.get_coordinate() is None:
        raise AxisError(
            f"this process, rank {dist.get_rank()}, is not in the mesh {listed.tolist()}.",
            cause="a mesh of some of the ranks, and code that all of them run.",
            fix="call this on the ranks of the mesh only, or give the others a mesh of theirs.",
        )
    ranks: list[int] = listed.flatten().tolist()
    if ranks != sorted(ranks) or mesh.ndim > (dims or mesh.ndim):
        raise AxisError(
            f"mesh has {mesh.ndim} dims {mesh.mesh_dim_names} of the ranks {listed.tolist()}.",
            cause="a mesh with dims of other kinds of parallelism, or with ranks in another order "
            "than that of their numbers, in which process groups have them.",
            fix='pass one dim of it, mesh["shard"], or two, mesh["replicate", "shard"], with '
            "the ranks in ascending order, so that those of a replica follow each other. For any "
            "number of dims, fzero.Mesh(mesh, replicate=...).",
        )
    return ranks


def _axis_of_names(mesh: Mesh) -> Axis:
    """Return the axis of all ranks of a mesh of named axes."""
    if mesh.whole is not None:
        return _axis_of_names(mesh.whole).joined([name for name, _ in mesh.axes])
    if (given := mesh.device_mesh) is None:
        axis = world()
    else:  # all of its ranks, in one dim
        ranks, like = _ranks_of(given), given.get_group(given.ndim - 1)
        axis = _axis_of_group(like if given.ndim == 1 else among(ranks, like))
        axis = axis.as_virtual() if is_abstract() else axis
    size = math.prod(n for _, n in mesh.axes)
    if size != axis.size:
        raise AxisError(
            f"mesh={dict(mesh.axes)} has {size} ranks, and there are {axis.size}.",
            cause="another number of ranks than the program was written for.",
            fix="give sizes of which the product is the number of ranks; for some of the ranks "
            "only, fzero.Mesh of a DeviceMesh.",
        )
    names = [name for name, _ in mesh.axes]
    if len(names) == 1:
        return replace(axis, name=names[0])
    name = "_".join(names) if "dp" in names else "dp"  # another one than the axes have
    made = replace(axis, name=name, named=mesh.axes)
    copies, others = mesh.axes[: len(mesh.replicate)], names[len(mesh.replicate) :]
    replicas = math.prod(n for _, n in copies)
    if replicas == 1:
        return made
    return replace(made, dims=Dims(replicas, ("_".join(n for n, _ in copies), "_".join(others))))


def refuse_part(mesh: Any, who: str) -> None:
    """Raise `AxisError`, in the name of `who`, for a part of a mesh, on which states are alone."""
    whole = mesh.whole if isinstance(mesh, Mesh) else mesh.mesh if isinstance(mesh, Axis) else None
    if whole is not None:
        raise AxisError(
            f"{who}: {mesh} is a part of a mesh.",
            cause="parameters with other values at each place of the other axes, of which "
            f"{who} knows one.",
            fix="fzero.init and shard make states on a part, and fzero.checkpoint.save and load "
            f"keep them; give {who} all of the mesh.",
        )


def mesh_of_replicas(mesh: MeshLike) -> Axis:
    """Return the axis that `mesh` means, in two dims; one dim is replicas of one rank each."""
    refuse_part(mesh, "local updates")
    axis = axis_of(mesh)
    if axis.dims is not None or axis.size == 1:
        return axis
    two = isinstance(mesh, tuple) or (isinstance(mesh, DeviceMesh) and mesh.ndim == 2)
    if axis.named and not two:
        raise AxisError(
            f"local updates on {axis}, of which no axis holds copies.",
            cause="a mesh of named axes, along which a loss may communicate: which of its ranks "
            "train apart?",
            fix=f'fzero.Mesh({dict(axis.named)}, replicate="{axis.named[0][0]}").',
        )
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
    name = copy_of(axis.group(), backend).group_name
    return replace(axis, group_name=name, whole=None, stride=1, mesh=None)


def ambient() -> Axis:
    """Return the axis of the step that runs now, or else the world.

    Raises `AxisError` where its states are on other ranks.
    """
    return axis_named(None, who="all ranks")


@contextmanager
def running_on(*axes: Axis) -> Generator[None, None, None]:
    """Make these the ambient axes in this block: one, or those of several states."""
    running = _running()
    running.append(axes)
    try:
        yield
    finally:
        running.pop()


def _running() -> list[tuple[Axis, ...]]:
    here = current_ranks()
    return _RUNNING if here is None else here.kept.setdefault(_running, [])


class Runs(Enum):
    """How the logical ranks of a rank run."""

    IN_TURN = "in turn"  # one ends before the next one begins
    FIRST_IN_TURN = "first in turn"  # as above, or together if a loss calls a collective
    TOGETHER = "together"  # as virtual ranks that wait for each other in a collective


class Carried(NamedTuple):
    """The logical ranks of the step that runs: how many, those of this rank, the one that runs."""

    size: int
    ranks: range
    rank: int | None = None  # None: outside of a loss
    runs: Runs = Runs.IN_TURN


class MetInLoss(BaseException):
    """A loss calls a collective where its logical ranks run in turn: they must run together.

    It ends the run of the first of them on every rank, and is no error: a loss that catches
    exceptions does not see it. `error` is what is raised where they cannot run together.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def carried_here() -> Carried | None:
    """Return the logical ranks of the step or the loss that runs; None if it has none."""
    carried = _carrying()
    return carried[-1] if carried else None


@contextmanager
def carrying(carried: Carried | None) -> Generator[None, None, None]:
    """Make these the logical ranks in this block."""
    here = _carrying()
    here.append(carried)
    try:
        yield
    finally:
        here.pop()


_CARRYING: list[Carried | None] = []


def _carrying() -> list[Carried | None]:
    here = current_ranks()
    return _CARRYING if here is None else here.kept.setdefault(_carrying, [])


def logical_ranks() -> range:
    """Return which logical ranks are here: in a loss the one that runs, in a step all of this rank.

    Returns:
        A range of ints. In a step without `logical_ranks=` each rank is its own:
        range(axis_index(), axis_index() + 1).

    Raises:
        AxisError: as `axis_index` does.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), fzero.logical_ranks()
        >>> step = fzero.shard(step_fn, stage=2, logical_ranks=4)
        >>> state = step.init(torch.ones(2), fzero.optim.sgd(1.0))
        >>> step(state, torch.ones(4, 2))[1]
        range(0, 4)
    """
    carried = carried_here()
    here = axis_index()
    if carried is None or carried.rank is not None:
        return range(here, here + 1)
    return carried.ranks


def axis_named(axis: Axis | str | None, *, who: str) -> Axis:
    """Return the axis that a caller `who` means: the ambient one, or a part of it by its name.

    Raises `AxisError` for what is neither, and for what is not the same on the meshes of all states
    of the step: it would depend on which of them is the first.
    """
    if isinstance(axis, Axis):
        return axis
    refuse_stray_thread()
    running = _running()
    here = running[-1] if running else (world(),)
    known = [one for one in here if axis in (None, *one.names)] or here[:1]
    found = [one if axis is None else one.along(axis, who=who) for one in known]
    for one, other in zip(known[1:], found[1:], strict=True):
        if not found[0].has_places_of(other):
            raise AxisError(
                f"{who}: axis={axis!r} in a loss or a step of states on {known[0]} and on {one}.",
                cause="states of two meshes: a loss is a mean over the ranks of one.",
                fix="make both on one mesh; or say which one is meant: "
                "axis=fzero.Mesh(...).axis.along(...), or .axis for all of its ranks.",
            )
    return found[0]


@outside_of_graphs
def axis_index(axis: Axis | str | None = None) -> int:
    """Return r, this rank's index on an axis.

    Args:
        axis: its name, or an axis. Default: that of the step that runs, else the world.

    In a loss under `logical_ranks=` it is the logical rank that runs.

    Returns:
        An int in range(axis_size()).

    Raises:
        AxisError: where the axis is not here, e.g. virtual ranks outside of `fzero.simulate`.

    Example:
        >>> axis_index()
        0
    """
    carried = carried_here()
    if axis is None and carried is not None and carried.rank is not None:
        return carried.rank
    return axis_named(axis, who="axis_index").rank


@outside_of_graphs
def axis_size(axis: Axis | str | None = None) -> int:
    """Return W, the number of ranks on an axis.

    Args:
        axis: its name, or an axis. Default: that of the step that runs, else the world.

    In a loss under `logical_ranks=` it is their number, L.

    Returns:
        An int, at least 1.

    Raises:
        AxisError: as `world` does, where no step runs.

    Example:
        >>> axis_size()
        1
    """
    carried = carried_here()
    if axis is None and carried is not None and carried.rank is not None:
        return carried.size
    return axis_named(axis, who="axis_size").size


def _axis_of_group(group: dist.ProcessGroup, name: str = "dp") -> Axis:
    size = dist.get_world_size(group)
    alone = os.environ.get("FZERO_ONE_RANK_GROUP") != "1"  # set it to try a backend on one rank
    if size == 1 and alone:  # nothing to say to anybody: the local axis spends no collective
        return Axis(name=name, size=1)
    return Axis(name=name, size=size, runtime=Runtime.PROCESSES, group_name=group.group_name)
