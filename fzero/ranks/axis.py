"""The record of an axis of ranks: one process, the processes of a group, or virtual ranks.

An axis of two dims has R replicas of S shards each: rank r S + s is in replica r, and has shard s.
Its parts are axes as well: `shards`, the ranks of one replica, and `replicas`, those of one shard.
A mesh of named axes counts its ranks with the last axis fastest; `along` gives the part of a name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fzero.context.here import current_ranks, in_forked_child, refuse_stray_thread
from fzero.errors import AxisError
from fzero.ranks._groups import is_of_parent, part_of_group, resolve

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
