"""Views: which elements of what they view a tensor is, where these are in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fzero.tools.prove._memory import Region
from fzero.tools.prove._terms import numel_of

Viewed = Region | list[Region] | None
"""A part of the same storage; None where the elements are not in a row there."""


def view_of(name: str, node: fx.Node, region: Region, args: tuple[Any, ...]) -> Viewed:
    """Return what a view op gives of a region; `args`: the further arguments."""
    if name in SAME:
        return region._replace(shape=tuple(node.meta["val"].shape))
    if name in RESHAPED:
        return _reshaped(region, tuple(args[0]))
    rule = PARTS.get(name)
    return None if rule is None else rule(region, *args)


SAME = frozenset({"detach", "alias", "unsqueeze", "squeeze"})
RESHAPED = frozenset({"view", "_unsafe_view", "reshape"})


def _reshaped(region: Region, shape: tuple[int, ...]) -> Viewed:
    if -1 in shape:
        known = numel_of([size for size in shape if size != -1])
        shape = tuple(region.numel // known if size == -1 else size for size in shape)
    return region._replace(shape=shape) if numel_of(shape) == region.numel else None


def _part(region: Region, dim: int, first: int, size: int, *, drops: bool = False) -> Region | None:
    """Return `size` elements of a dim from `first` on."""
    dim, shape = dim % len(region.shape), region.shape
    if numel_of(shape[:dim]) != 1 or first < 0 or first + size > shape[dim]:
        return None
    inner = numel_of(shape[dim + 1 :])
    kept = shape[:dim] + (() if drops else (size,)) + shape[dim + 1 :]
    return Region(region.storage, region.start + first * inner, kept)


def _split(region: Region, sizes: Any, dim: int = 0) -> Viewed:
    total = region.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    found, at = [], 0
    for size in sizes:
        found.append(_part(region, dim, at, size))
        at += size
    return found if at == total and all(x is not None for x in found) else None  # type: ignore


def _select(region: Region, dim: int, index: int) -> Viewed:
    return _part(region, dim, index % region.shape[dim], 1, drops=True)


def _slice(region: Region, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Viewed:
    size = region.shape[dim]
    first, last, _ = slice(start, stop).indices(size)
    return _part(region, dim, first, max(last - first, 0)) if step == 1 else None


def _unbind(region: Region, dim: int = 0) -> Viewed:
    found = [_part(region, dim, i, 1, drops=True) for i in range(region.shape[dim])]
    return found if all(x is not None for x in found) else None  # type: ignore


PARTS: dict[str, Callable[..., Viewed]] = {
    "split": _split,
    "split_with_sizes": _split,
    "select": _select,
    "slice": _slice,
    "unbind": _unbind,
}
