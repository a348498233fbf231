"""How far rounding carries, and the first number that differs by more.

A sum of n terms in any order is the exact sum of terms that are each changed by at most (n - 1) u
of themselves (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). So:

    over ranks and micro-batches    the terms are known: (n + 4) u sum(|terms|)
    inside of a loss, an update     the terms are not known: run a is made a second time with every
                                    parameter and every input changed by 4 u of itself, up or down;
                                    4 times the largest change of a leaf's numbers that this makes

u is the spacing of numbers at 1 in the coarsest dtype of the two runs, and not below 2^-44, so that
sums of thousands of terms inside of a loss are covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.certify._compare import worst_over
from fzero.diff._values import Copy, Spread

SMALLEST_UNIT = 2.0**-44
DISTURBANCE = 4.0  # units by which parameters and inputs are changed
MARGIN = 4.0  # times what that makes of a number
TERMS = 4  # roundings of one number beside its sum: casts, divisions


class Found(NamedTuple):
    """Where two leaves differ."""

    ranks: tuple[int, ...]
    index: tuple[int, ...]
    a: float
    b: float
    bound: float


def carried(a: Tensor, twin: Tensor) -> float:
    """What the disturbance makes of the numbers of a leaf, with the margin."""
    off, _ = _disturbed(a, twin)
    return MARGIN * float(off.max()) if off.numel() else 0.0


def carried_each(a: Tensor, twin: Tensor) -> Tensor:
    """The same element by element: a few of a leaf may be much less certain than the others.

    What the disturbance makes of one element is chance; what it makes of all of them, r, is not:
    4 (own + 3 r), and not more than `carried` says.
    """
    off, typical = _disturbed(a, twin)
    return (MARGIN * (off + 3 * typical)).clamp(max=carried(a, twin))


def noise(a: Tensor, twin: Tensor) -> Tensor:
    """How large an element is that may be rounding and nothing else: own + 4 r, as above.

    The gradient by the bias of attention's keys is such: it is zero, but for rounding.
    """
    off, typical = _disturbed(a, twin)
    return off + MARGIN * typical


def _disturbed(a: Tensor, twin: Tensor) -> tuple[Tensor, Tensor | float]:
    """How far each element was moved, and r, the root of the mean square of that."""
    off = (a.double() - twin.double()).abs().nan_to_num(0.0, posinf=0.0)
    return off, off.square().mean().sqrt() if off.numel() else 0.0


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
