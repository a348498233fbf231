"""Which batch a rank reads, and which piece of it: meshes of named axes, some of which cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from fzero.errors import LayoutError
from fzero.ranks.mesh import Axis, Mesh, running_on
from fzero.state import NAMESPACE

Cut = Mapping[str, Any]
"""{axis: dim of every tensor, or a pytree of dims, or fn(batch, index, size) -> the piece}."""

PieceOf = Callable[[Any, int, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What each rank of a mesh reads: ranks that differ in a cut axis alone share a batch."""

    axes: tuple[tuple[str, int], ...]  # the last one fastest
    cut: Cut

    @property
    def places(self) -> int:
        """How many ranks read other batches."""
        return math.prod(size for name, size in self.axes if name not in self.cut)

    @property
    def pieces(self) -> int:
        """How many ranks share a batch."""
        return math.prod(size for name, size in self.axes if name in self.cut)

    def place(self, rank: int) -> int:
        """Return which of the batches this rank reads, in range(places)."""
        at = self._coordinates(rank)
        found = 0
        for name, size in self.axes:
            found = found if name in self.cut else found * size + at[name]
        return found

    def piece(self, batch: Any, rank: int) -> Any:
        """Return what this rank reads of a batch. Raises `LayoutError` if it cannot be cut."""
        at = self._coordinates(rank)
        for name, size in self.axes:
            if name in self.cut:
                batch = _piece(batch, name, self.cut[name], at[name], size)
        return batch

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found


def _piece(batch: Any, name: str, how: Any, index: int, size: int) -> Any:
    if callable(how):
        return how(batch, index, size)
    leaves, treedef = optree.tree_flatten(batch, none_is_leaf=True, namespace=NAMESPACE)
    try:
        dims = optree.broadcast_prefix(how, batch, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        raise LayoutError(
            f"certify: cut={{{name!r}: {how!r}}} does not fit a batch ({error}).",
            cause="dims in another structure than the batch has.",
            fix="give one dim for all tensors, a dim or None for each argument, or a function "
            "fn(batch, index, size) -> the piece.",
        ) from error
    pieces = [
        x if dim is None else _chunk(x, dim, name, index, size)
        for x, dim in zip(leaves, dims, strict=True)
    ]
    return treedef.unflatten(pieces)


def _chunk(x: Any, dim: Any, name: str, index: int, size: int) -> Tensor:
    is_dim = isinstance(x, Tensor) and type(dim) is int and -x.ndim <= dim < x.ndim
    if is_dim and x.shape[dim] % size == 0:
        return x.chunk(size, dim)[index]
    seen = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x)}"
    raise LayoutError(
        f"certify: {seen} cannot be cut in {size} along dim {dim!r}, for the axis {name!r}.",
        cause="a dim that it does not have, or one of a size that the ranks do not divide.",
        fix="give None for what every rank has whole, batches of another length, or a function "
        "fn(batch, index, size) -> the piece.",
    )


@contextmanager
def alone_on(names: tuple[str, ...]) -> Iterator[None]:
    """Let one process know axes by their names, each with one rank; without names, nothing."""
    if not names:
        yield
        return
    own = names[0] if len(names) == 1 else "_".join(["dp", *names])
    named = tuple((name, 1) for name in names) if len(names) > 1 else ()
    with running_on(Axis(name=own, size=1, named=named)):
        yield


def require_cut(meshes: list[Mesh | None], cut: Cut, given: Mapping[str, Any]) -> None:
    """Raise `LayoutError` for a cut, or axes of the matrix, that meshes of names do not allow."""
    named = [mesh for mesh in meshes if mesh is not None]
    if not named:
        if cut:
            raise LayoutError(
                f"certify: cut={dict(cut)}, and no mesh with names.",
                cause="ranks that all read whole batches: nothing would be cut.",
                fix='name the axes too, meshes={"data": 2, "seq": 2}.',
            )
        return
    if len(named) < len(meshes) or "worlds" in given:
        raise LayoutError(
            "certify: meshes with names beside "
            f"{'`worlds`' if len(named) == len(meshes) else 'others'}.",
            cause="sizes of named axes say how many ranks there are, and a loss that names an axis "
            "has no meaning on a mesh without it.",
            fix='give meshes={"data": 2, "seq": 2}, or a list of such, and no `worlds`.',
        )
    for mesh in named:
        if mesh.whole is not None:
            raise LayoutError(
                f"certify: meshes={mesh}, which is a part of {mesh.whole}.",
                cause="a state with other values at each place of a mesh, which one process has "
                "not.",
                fix="give the whole mesh, with a model that is the same everywhere.",
            )
        names = [name for name, _ in mesh.axes]
        if unknown := [name for name in cut if name not in names]:
            raise LayoutError(
                f"certify: cut names {unknown}, and a mesh has the axes {names}.",
                cause="a mistyped name, or a mesh without that axis.",
                fix="give each mesh the axis, of size 1 where nothing is cut.",
            )
