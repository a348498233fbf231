"""Between which ranks a live state moves: the old mesh, the new one, and the larger of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fzero.checkpoint.everywhere import Ranks, everywhere
from fzero.context.here import current_ranks
from fzero.errors import AxisError, FzeroError, LayoutError
from fzero.ranks.mesh import Axis, MeshLike, Runtime, axis_of, refuse_part, world

T = TypeVar("T")


def on_all(axis: Axis, do: Callable[[], T]) -> T:
    """Return `do()` once it has succeeded on every rank; raise an error of one on all of them."""

    def run() -> T:
        try:
            return do()
        except FzeroError:
            raise
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            raise LayoutError(
                f"reshard: {type(error).__name__}: {text}",
                cause="a rank without memory for its new part, which is there beside the old one.",
                fix="free memory before the call, or go by fzero.checkpoint.save and load. The "
                "state is as it was.",
            ) from error

    return everywhere(Ranks(axis=axis), run, what="reshard")


class Between(NamedTuple):
    """What a rank knows of a move."""

    axis: Axis  # all ranks that take part
    mesh: MeshLike  # the new one
    is_in: bool  # whether this rank is in it
    asked: str  # which ranks it has, as all ranks must have it in common


def between(old: Axis | None, mesh: MeshLike) -> Between:
    """Return between which ranks a state moves that is on the mesh `old` now.

    old: None on a rank that has no state.

    Raises `AxisError` unless one mesh has all ranks of the other; on all ranks of the new one.
    """
    refuse_part(mesh, "reshard")
    if mesh is None:
        if old is None:
            raise LayoutError(
                "reshard(None): a rank without a state, and no mesh.",
                cause="mesh= was left out; a state says on which mesh it is, None does not.",
                fix="give the new mesh on every rank: mesh=fzero.world() for all ranks.",
            )
        return Between(replace(old, dims=None), old, True, f"{old}")
    if current_ranks() is not None:
        return _between_virtual(old, mesh)
    ours = global_ranks(old)
    theirs = _ranks_of_mesh(mesh)
    mine = dist.get_rank() if theirs is not None and dist.is_initialized() else 0
    if theirs is None or theirs == [mine] == ours:  # one rank without a process group
        new = axis_of(mesh)
        return Between(replace(new, dims=None), mesh, True, f"{new}")
    is_in, asked = mine in theirs, f"the ranks {theirs}"
    if is_in and (old is None or set(ours) <= set(theirs)):
        return Between(replace(axis_of(mesh), dims=None), mesh, True, asked)
    if old is not None and set(theirs) < set(ours):
        return Between(replace(old, dims=None), mesh, is_in, asked)

    def refuse() -> NoReturn:
        raise AxisError(
            f"reshard from the ranks {ours} to the ranks {theirs}, called on rank {mine}.",
            cause="two meshes of which neither has all ranks of the other, or a call on a rank "
            "that is in none of them.",
            fix="go by a mesh that has all of them: reshard to that, then to the ranks that stay. "
            "All ranks of the larger mesh call it, and no other.",
        )

    if is_in:
        on_all(axis_of(mesh), refuse)  # the others of the new mesh wait for this one
    refuse()


def _between_virtual(old: Axis | None, mesh: MeshLike) -> Between:
    """Inside `fzero.simulate` all ranks have a state before, and after."""
    new, here = axis_of(mesh), world()
    if old is None or not new.size == old.size == here.size:
        before = "no state" if old is None else f"a state of {old.size} ranks"
        raise AxisError(
            f"reshard inside of {here.size} virtual ranks: of {before}, to {new.size} ranks.",
            cause="virtual ranks that come and go inside of fzero.simulate, whose tensors have "
            "one row for each rank.",
            fix="call it outside, with the stacked state: fzero.reshard(state, mesh=(1, W)) for W "
            "ranks in one dim, which gives a state for fzero.simulate(..., world_size=W).",
        )
    return Between(replace(new, dims=None), new, True, f"{new}")


def global_ranks(axis: Axis | None) -> list[int]:
    """Return the ranks of an axis among all of the program; none for None."""
    if axis is None:
        return []
    if axis.runtime is Runtime.VIRTUAL:
        return [*range(axis.size)]
    if axis.runtime is Runtime.PROCESSES:
        return dist.get_process_group_ranks(axis.group())
    return [dist.get_rank() if dist.is_initialized() else 0]


def _ranks_of_mesh(mesh: Any) -> list[int] | None:
    """Return the global ranks that a mesh means; None where there is one process."""
    if isinstance(mesh, DeviceMesh):
        return mesh.mesh.flatten().tolist()
    axis = axis_of(mesh)
    if axis.runtime is Runtime.VIRTUAL:
        raise AxisError(
            f"reshard to {axis}: the state is one of processes.",
            cause="a mesh of virtual ranks, which stacked states have.",
            fix="give a DeviceMesh, or fzero.world().",
        )
    if axis.runtime is Runtime.LOCAL and world().size > 1:
        raise AxisError(
            f"reshard to {axis}, which is another rank on each of {world().size} processes.",
            cause="an Axis(size=1), made by hand.",
            fix='say which rank it is: DeviceMesh("cpu", [0]).',
        )
    return global_ranks(axis) if dist.is_available() and dist.is_initialized() else None
