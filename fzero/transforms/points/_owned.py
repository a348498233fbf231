"""Whole leaves on the ranks that own them, for transforms that need matrices.

parts of each rank  - one exchange for a batch ->  {path: the leaf}, on its owner
parts of each rank  <- one exchange for a batch -  what a function made of it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fzero.machine.named_shards import leaf_paths
from fzero.machine.owners import Owners, every_leaf_owned
from fzero.state import Setup
from fzero.state.layout import as_complex, as_real

Wholes = dict[str, Tensor]
"""{path: the whole leaf in its shape}: of the leaves of a batch that this rank owns."""


def path_of(setup: Setup, owners: Owners, number: int) -> str:
    """Return the path of a leaf by its number among those with owners."""
    return leaf_paths(setup.layout)[owners.leaves[number].index]


def owned_paths(setup: Setup) -> dict[str, bool]:
    """Return {path: whether this rank owns the leaf} of all leaves that learn."""
    owners = every_leaf_owned(setup)
    rank = owners.axis.rank
    return {path_of(setup, owners, k): one.owner == rank for k, one in enumerate(owners.leaves)}


def on_owners(
    setup: Setup,
    inputs: Sequence[Sequence[Tensor]],
    compute: Callable[[list[Wholes]], Mapping[str, Tensor]],
    outs: Sequence[Tensor],
) -> None:
    """Write compute(wholes of each input) into `outs`, leaf by leaf on its owner. A collective.

    inputs: lists of this rank's parts of the flats that learn. outs: parts that are written to.
    compute: called once for each batch, on every rank, also for one of which it owns nothing.
    """
    owners = every_leaf_owned(setup)

    def of_batch(numbers: list[int], wholes: Mapping[int, list[Tensor]]) -> dict[int, Tensor]:
        paths = {k: path_of(setup, owners, k) for k in numbers}
        given = [
            {path: _shaped(owners, k, wholes[k][j]) for k, path in paths.items()}
            for j in range(len(inputs))
        ]
        made = compute(given)
        return {k: as_real(made[path]).reshape(-1) for k, path in paths.items()}

    owners.run(inputs, of_batch, outs)


def owned_wholes(setup: Setup, flats: Sequence[Tensor]) -> Wholes:
    """Return {path: the whole leaf in its shape} of the leaves that this rank owns. A collective.

    flats: this rank's parts.
    """
    found: Wholes = {}

    def keep(given: list[Wholes]) -> Wholes:
        found.update({path: x.clone() for path, x in given[0].items()})
        return given[0]

    on_owners(setup, [list(flats)], keep, [x.clone() for x in flats])
    return found


def _shaped(owners: Owners, number: int, flat: Tensor) -> Tensor:
    leaf = owners.leaves[number].leaf
    return (as_complex(flat) if leaf.dtype.is_complex else flat).view(leaf.shape)
