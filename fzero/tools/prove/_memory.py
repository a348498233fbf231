"""The memory of a program: what tensors have, which of them are views of others, who writes where."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fzero.tools.prove._terms import Piece, Value, joined, numel_of, part_of


class Region(NamedTuple):
    """Elements of a storage in a row, as a tensor of some shape."""

    storage: int
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements on one rank."""
        return numel_of(self.shape)


class Storage(NamedTuple):
    """What a storage has now; `writes` counts how often it was written to.

    of: the storage, and its `writes`, that this one was read from: a view that is kept as a copy.
    """

    value: Value
    writes: int = 0
    of: tuple[int, int] | None = None


class Memory:
    """The storages of one program, while it is read. `world`: the number of ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._storages: list[Storage] = []

    def new(self, value: Value, of: Region | None = None) -> Region:
        """Return a new storage with a value; `of`: whose view it is, in another order."""
        source = None if of is None else (of.storage, self._storages[of.storage].writes)
        flat = value._replace(shape=(value.numel,))
        self._storages.append(Storage(flat, of=source))
        return Region(len(self._storages) - 1, 0, value.shape)

    def all_of(self, region: Region) -> Region:
        """Return all elements of the storage of a region."""
        return Region(region.storage, 0, self._storages[region.storage].value.shape)

    def read(self, region: Region) -> Value | None:
        """Return what is there; None for a view whose viewed value was written to since."""
        held = self._storages[region.storage]
        if held.of is not None and self._storages[held.of[0]].writes != held.of[1]:
            return None
        pieces = part_of(held.value, region.start, region.numel, self.world)
        return Value(region.shape, pieces, held.value.spread)

    def write(self, region: Region, value: Value) -> bool:
        """Put a value there; return False where that cannot be followed."""
        held = self._storages[region.storage]
        if held.of is not None or value.numel != region.numel:
            return False
        old = held.value
        if region.numel == old.numel:
            new = value._replace(shape=old.shape)
        elif value.spread or old.spread:
            return False
        else:
            new = old._replace(pieces=_replaced(old, region, value.pieces))
        self._storages[region.storage] = Storage(new, held.writes + 1)
        return True

    def spoil(self, region: Region, unknown: Callable[[int], Value]) -> None:
        """Take nothing for known of a storage, nor of what it is a view of."""
        held = self._storages[region.storage]
        ranks = self.world if held.value.spread else 1
        value = held.value._replace(pieces=unknown(held.value.numel * ranks).pieces)
        self._storages[region.storage] = Storage(value, held.writes + 1, held.of)
        if held.of is not None:
            self.spoil(Region(held.of[0], 0, ()), unknown)


def _replaced(old: Value, region: Region, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    stop = region.start + region.numel
    before = part_of(old, 0, region.start, 1) if region.start else ()
    after = part_of(old, stop, old.numel - stop, 1) if stop < old.numel else ()
    return joined((*before, *pieces, *after))
