"""Reshard flat buffers between placements: cut to a smaller part, gather a larger one.

    REPLICATED [S l]  <- gather over shards -  SHARDED [l]  <- over replicas -  OVER_ALL [l / R]
                       - cut ->                              - cut ->

The sum over ranks goes the same way: over the shards of a replica, then over the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fzero.collectives import gather_many, reduce_many, scatter_many, start_gather_in_place
from fzero.machine.packing import part_of
from fzero.ranks.mesh import Axis
from fzero.state import Placement, Setup


def over_places(setup: Setup, x: Tensor) -> Tensor:
    """Return the sum over the places of a mesh of what is equal on the ranks of each.

    A collective of all the mesh for a state on a part of one; else x itself.
    """
    mesh = setup.axis.mesh
    if mesh is None:
        return x
    return reduce_many([x], mesh, ordered=setup.reduction.ordered)[0] / setup.axis.size


def cut(setup: Setup, flat: Tensor, held: Placement, to: Placement) -> Tensor:
    """Return this rank's part of a flat under placement `to`: a view of that under `held`."""
    if held is to:
        return flat
    rank = setup.axis.rank
    return part_of(flat, setup.part(held, rank), setup.part(to, rank))


def gather_parts(
    setup: Setup, flats: Sequence[Tensor], held: Placement, to: Placement
) -> list[Tensor]:
    """Gather parts under placement `held` into larger parts under `to`. Adjoint: sum and cut."""
    for axis, _ in _steps(setup, held, to):
        flats = gather_many(flats, axis)
    return list(flats)


def gather_parts_in_place(
    setup: Setup, flats: Sequence[Tensor], held: Placement, to: Placement
) -> None:
    """Gather in place into `flats`, in which this rank's part (`held`) is filled already."""
    for axis, made in _steps(setup, held, to):
        start_gather_in_place([cut(setup, flat, to, made) for flat in flats], axis).wait()


def sum_parts(setup: Setup, flats: Sequence[Tensor]) -> list[Tensor]:
    """Each [S l] -> this rank's part of the sum over ranks, as gradients are placed.

    By collectives that torch.func differentiates.
    """
    axis, ordered = setup.axis, setup.reduction.ordered
    if setup.reduces_in_place:
        return reduce_many(flats, axis, ordered=ordered)
    flats = scatter_many(flats, axis.shards, ordered=ordered)
    across = scatter_many if setup.gradients is Placement.OVER_ALL else reduce_many
    return across(flats, axis.replicas, ordered=ordered)


def _steps(setup: Setup, held: Placement, to: Placement) -> list[tuple[Axis, Placement]]:
    """The axes to gather over, in order, each with the placement after it."""
    steps = []
    if held is Placement.OVER_ALL and to is not held:
        steps.append((setup.axis.replicas, Placement.SHARDED))
    if to is Placement.REPLICATED and to is not held:
        steps.append((setup.axis.shards, Placement.REPLICATED))
    return steps
