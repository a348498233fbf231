"""A leaf as the ranks have it, and its first number that differs by more than is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Copy(NamedTuple):
    """What one rank has of a leaf: elements from `start` on, flat. rank -1: a sum over ranks."""

    rank: int
    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """A leaf as the ranks have it."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def full(self) -> Tensor:
        """The leaf, flat; of each element, the copy on the lowest rank. Zero where nobody has it.

        In its own dtype.
        """
        numel = torch.Size(self.shape).numel()
        dtype = self.copies[0].values.dtype if self.copies else torch.float64
        found = torch.zeros(numel, dtype=dtype)
        for _, start, values in reversed(self.copies):
            found[start : start + values.numel()] = values
        return found


def whole_leaf(value: Tensor, rank: int = -1) -> Spread:
    """A leaf that one rank has whole, or that is a sum over ranks."""
    return Spread(shape=tuple(value.shape), copies=(Copy(rank, 0, value.reshape(-1).cpu()),))


def of_ranks(values: Sequence[float]) -> Spread:
    """One number that each rank has."""
    copies = [Copy(rank, 0, torch.tensor([float(x)]).double()) for rank, x in enumerate(values)]
    return Spread(shape=(1,), copies=tuple(copies))


class Found(NamedTuple):
    """Where two leaves differ."""

    ranks: tuple[int, ...]
    index: tuple[int, ...]
    a: float
    b: float
    bound: float


def first_apart(a: Spread, b: Spread, bound: Tensor | float) -> Found | None:
    """The copies in b that are not what a has, or else those in a that are not what b has."""
    found = _apart(a.full, b.copies, b.shape, bound)
    if found is not None:
        return found
    turned = _apart(b.full, a.copies, a.shape, bound)
    return turned and turned._replace(a=turned.b, b=turned.a)


def replicas_apart(a: Spread) -> Found | None:
    """The copies of one run that are not bit for bit those on its lowest rank."""
    return _apart(a.full, a.copies, a.shape, 0.0)


def furthest(
    mine: Tensor, wanted: Tensor, bound: Tensor | float, *, shape: Sequence[int], start: int = 0
) -> Found | None:
    """The element that is furthest over its bound: `b` is mine, `a` what is wanted.

    None if none is over. A NaN is, on either side.

    Args:
        mine: [n] float64, elements from `start` on of a leaf.
        wanted: [n] float64, of the same elements.
        bound: of each element, or of all.
        shape: of the leaf; the index of the element is in it.
        start: the first element.

    Example:
        >>> furthest(torch.tensor([1.0, 2.0]), torch.zeros(2), 1.5, shape=(2, 2), start=2)
        Found(ranks=(), index=(1, 1), a=0.0, b=2.0, bound=1.5)
    """
    off, most = (mine - wanted).abs(), torch.as_tensor(bound, dtype=torch.float64)
    if bool((off <= most).all()):
        return None
    k = int((off - most).nan_to_num(torch.inf).argmax())
    at = torch.unravel_index(torch.tensor(start + k), tuple(shape)) if shape else ()
    allowed = float(most.expand(off.shape)[k])
    return Found((), tuple(int(i) for i in at), float(wanted[k]), float(mine[k]), allowed)


def _apart(
    full: Tensor, copies: Sequence[Copy], shape: Sequence[int], bound: Tensor | float
) -> Found | None:
    wanted = full.double()
    given = torch.as_tensor(bound, dtype=torch.float64).expand(wanted.shape)
    allowed = given.nan_to_num(0.0, posinf=torch.inf)  # of a NaN on both sides
    ranks, first = [], None
    for rank, start, values in copies:
        part = slice(start, start + values.numel())
        mine, theirs = values.double(), wanted[part]
        alike = (mine == theirs) | (mine.isnan() & theirs.isnan())  # an infinity, too
        mine, theirs = mine.masked_fill(alike, 0.0), theirs.masked_fill(alike, 0.0)
        found = furthest(mine, theirs, allowed[part], shape=shape, start=start)
        if found is not None:
            first = first or found
            ranks += [rank] if rank >= 0 else []
    return first and first._replace(ranks=tuple(sorted(ranks)))
