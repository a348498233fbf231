"""The first number of a leaf that differs by more than is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.certify._rounding import worst_over
from fzero.diff._values import Copy, Spread


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


def _apart(
    full: Tensor, copies: Sequence[Copy], shape: Sequence[int], bound: Tensor | float
) -> Found | None:
    wanted = full.double()
    given = torch.as_tensor(bound, dtype=torch.float64).expand(wanted.shape)
    allowed = given.nan_to_num(0.0, posinf=torch.inf)  # of a NaN on both sides
    ranks, first = [], None
    for rank, start, values in copies:
        part = slice(start, start + values.numel())
        mine, theirs, most = values.double(), wanted[part], allowed[part]
        alike = (mine == theirs) | (mine.isnan() & theirs.isnan())  # an infinity, too
        k = worst_over(mine.masked_fill(alike, 0.0), theirs.masked_fill(alike, 0.0), most)
        if k is None:
            continue
        if rank >= 0:
            ranks.append(rank)
        if first is None:
            at = torch.unravel_index(torch.tensor(start + k), tuple(shape)) if shape else ()
            index = tuple(int(i) for i in at)
            first = Found((), index, float(theirs[k]), float(mine[k]), float(most[k]))
    return first and first._replace(ranks=tuple(sorted(ranks)))
