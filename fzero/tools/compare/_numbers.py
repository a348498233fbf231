"""The copies of a leaf on all ranks, and the element in which two leaves differ too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Copy(NamedTuple):
    """One rank's part of a flat leaf, elements from `start` on. rank -1: a sum over ranks."""

    rank: int
    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """A leaf: its shape, and the parts of all ranks."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def full(self) -> Tensor:
        """The flat leaf: each element from the lowest rank that has it, or 0 if none has.

        In its own dtype.
        """
        numel = torch.Size(self.shape).numel()
        dtype = self.copies[0].values.dtype if self.copies else torch.float64
        found = torch.zeros(numel, dtype=dtype)
        for _, start, values in reversed(self.copies):
            found[start : start + values.numel()] = values
        return found


def whole_leaf(value: Tensor, rank: int = -1) -> Spread:
    """Return the `Spread` of a full leaf, of one rank or summed over ranks."""
    return Spread(shape=tuple(value.shape), copies=(Copy(rank, 0, value.reshape(-1).cpu()),))


def of_ranks(values: Sequence[float]) -> Spread:
    """Return the `Spread` of one number of each rank."""
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
    """Return where copies in b differ from a, or else where copies in a differ from b."""
    found = _apart(a.full, b.copies, b.shape, bound)
    if found is not None:
        return found
    turned = _apart(b.full, a.copies, a.shape, bound)
    return turned and turned._replace(a=turned.b, b=turned.a)


def replicas_apart(a: Spread) -> Found | None:
    """Return where copies of one run differ in any bit from that on its lowest rank."""
    return _apart(a.full, a.copies, a.shape, 0.0)


def furthest(
    mine: Tensor, wanted: Tensor, bound: Tensor | float, *, shape: Sequence[int], start: int = 0
) -> Found | None:
    """Return the element that exceeds its bound most: `b` is mine, `a` what is wanted.

    None if none exceeds it. A NaN on either side does.

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
