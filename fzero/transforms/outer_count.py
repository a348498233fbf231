"""Which replicas are in the mean of an outer update: what they tell each other before it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.collectives import performer_of
from fzero.context.current_rank import has_no_values
from fzero.errors import explain
from fzero.state import Outer

_FINITE, _COUNTS = 1, 2


class Counted(NamedTuple):
    """Who is in the mean of an outer update."""

    own: bool  # this replica
    count: int
    finite: bool = True  # whether this replica's values are
    all_finite: bool = True  # whether those of all replicas are


def agreed(held: Outer, due: int, stepped: Sequence[Tensor], *, general: bool) -> Counted:
    """Ask all replicas whether they are in the mean: those of finite values that want to be.

    The host reads one number. Under a transform, in a trace and without values all replicas are.
    """
    size, shards = held.mesh.replicas.size, held.mesh.size // held.mesh.replicas.size
    if general:
        return Counted(own=True, count=size)
    flag = _FINITE | _COUNTS
    if not any(map(has_no_values, stepped)):
        good = [torch.isfinite(x).all() for x in stepped if x.numel()]
        flag = _FINITE * (not good or bool(torch.stack(good).all()))
        flag += _COUNTS * bool(held.weight[due])
    performer = performer_of(held.mesh)
    name = f"the outer update of fragment {due}"
    rows = [[flag]] if performer is None else performer.call_with(name, lambda: [flag])
    by_replica = [rows[i : i + shards] for i in range(0, len(rows), shards)]
    finite = [all(row[0] & _FINITE for row in some) for some in by_replica]
    counts = [
        good and all(row[0] & _COUNTS for row in some)
        for good, some in zip(finite, by_replica, strict=True)
    ]
    if not all(finite):
        warnings.warn(_left_out([i for i, x in enumerate(finite) if not x], size), stacklevel=2)
    own = held.mesh.rank // shards
    return Counted(counts[own], sum(counts), finite=finite[own], all_finite=all(finite))


def _left_out(bad: list[int], size: int) -> str:
    rest = "the mean is that of the others" if len(bad) < size else "the anchors stay"
    return explain(
        f"replicas {bad} of {size} have parameters that are not finite: {rest}. They go on from "
        "the anchors, with optimizer states of zeros.",
        cause="a learning rate that is too large, or an overflow without a loss scale.",
        fix="lower the rate, or clip (fzero.clip); fzero.check_finite raises at once.",
    )
