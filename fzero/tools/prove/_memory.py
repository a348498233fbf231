"""Storages, and views of elements in a row: what is where, while a program is read."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from fzero.tools.prove._terms import Symbolic, cut, joined


class StorageSlice(NamedTuple):
    """Elements of a storage in a row, as a tensor of some shape."""

    storage: int
    start: int
    shape: tuple[int, ...]


class _Source(NamedTuple):
    """What a storage is kept as a copy of, but is a view of.

    writes: how often that had been written to. chunk: one of several that do not overlap, and are
    the only ones of it.
    """

    storage: int
    writes: int
    chunk: bool


class _Storage(NamedTuple):
    value: Symbolic
    writes: int = 0
    of: _Source | None = None
    chunked: bool = False
    lost: bool = False  # a chunk of it was written to


class Storages:
    """The storages of a program on `world` ranks."""

    def __init__(self, world: int) -> None:
        self._world, self._storages = world, list[_Storage]()

    def new(
        self, value: Symbolic, of: StorageSlice | None = None, *, chunk: bool = False
    ) -> StorageSlice:
        """Return a new storage; `of`: what it is a view of, whose elements are not in a row."""
        source = None
        if of is not None:
            held = self._storages[of.storage]
            source = _Source(of.storage, held.writes, chunk)
            self._storages[of.storage] = held._replace(chunked=held.chunked or chunk)
        self._storages.append(_Storage(value._replace(shape=(value.numel,)), of=source))
        return StorageSlice(len(self._storages) - 1, 0, value.shape)

    def may_be_chunked(self, region: StorageSlice) -> bool:
        """Return whether chunks of a region may be written to apart from each other."""
        held = self._storages[region.storage]
        return prod(region.shape) == held.value.numel and held.of is None and not held.chunked

    def all_of(self, region: StorageSlice) -> StorageSlice:
        """Return the storage of a region as one."""
        return StorageSlice(region.storage, 0, self._storages[region.storage].value.shape)

    def read(self, region: StorageSlice) -> Symbolic:
        """Return what is there."""
        held, numel = self._storages[region.storage], prod(region.shape)
        at = held
        stale = held.lost
        while at.of is not None:  # a view of a view is one of the first
            of, at = at.of, self._storages[at.of.storage]
            stale = stale or at.writes != of.writes or (at.lost and not of.chunk)
        if stale:
            raise NotImplementedError("it reads a view of what was written to since")
        full, pieces = held.value, held.value.pieces
        if numel != full.numel:
            ranks = range(self._world if full.spread else 1)
            parts = (cut(pieces, r * full.numel + region.start, numel) for r in ranks)
            pieces = joined(piece for part in parts for piece in part)
        return Symbolic(region.shape, pieces, full.spread)

    def write(self, region: StorageSlice, value: Symbolic) -> None:
        """Put a value there."""
        held, numel = self._storages[region.storage], value.numel
        old, new, stop = held.value, value.pieces, region.start + numel
        part = numel != old.numel
        view = held.of is not None and not held.of.chunk
        if view or prod(region.shape) != numel or (part and (value.spread or old.spread)):
            raise NotImplementedError("it writes to elements that are not in a row")
        if part:
            after = cut(old.pieces, stop, old.numel - stop)
            new = joined([*cut(old.pieces, 0, region.start), *new, *after])
        made = Symbolic(old.shape, new, value.spread)
        self._storages[region.storage] = held._replace(value=made, writes=held.writes + 1)
        if held.of is not None:
            base = self._storages[held.of.storage]
            self._storages[held.of.storage] = base._replace(lost=True)


def view_of(name: str, region: StorageSlice, args: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the region or regions of a view; None where its elements are not in a row.

    name: of an op of the table of views. args: all its further arguments. shape: of its result.
    """
    if name in ("detach", "alias", "unsqueeze", "squeeze"):
        return region._replace(shape=tuple(shape))
    if name in ("view", "_unsafe_view"):
        numel, rest = prod(region.shape), prod(size for size in args[0] if size != -1)
        made = tuple(numel // rest if size == -1 else size for size in args[0])
        return region._replace(shape=made) if prod(made) == numel else None
    if name in ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"):
        return _split(region, *args)
    if name == "select":
        dim, index = args
        return _part(region, dim, index % region.shape[dim], 1, ())
    if name == "slice":
        return _sliced(region, *args)
    return None


def _part(region: StorageSlice, dim: int, first: int, size: int, kept: tuple[int, ...]) -> Any:
    outer, inner = prod(region.shape[:dim]), prod(region.shape[dim + 1 :])
    fits = outer == 1 and dim >= 0 and 0 <= first <= first + size <= region.shape[dim]
    shape = (*region.shape[:dim], *kept, *region.shape[dim + 1 :])
    return StorageSlice(region.storage, region.start + first * inner, shape) if fits else None


def _split(region: StorageSlice, sizes: Any, dim: int = 0) -> Any:
    total, found, at = region.shape[dim], [], 0
    if isinstance(sizes, int):
        sizes = [min(sizes, total - first) for first in range(0, total, sizes)]
    for size in sizes:
        found.append(_part(region, dim, at, size, (size,)))
        at += size
    return found if at == total and all(found) else None


def _sliced(
    region: StorageSlice, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Any:
    first, last, _ = slice(start, stop).indices(region.shape[dim])
    size = max(last - first, 0)
    return _part(region, dim, first, size, (size,)) if step == 1 else None
