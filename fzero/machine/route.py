"""The collectives that bring a bucket of gradients to its sum, one after another.

plain, stages 1 to 3    reduce-scatter over the shards, then what a mesh of two dims has left
plain, stage 0          all-reduce
encoded                 see fzero/machine/encode.py; of "replicas", after the reduce-scatter
as factors              two all-reduces: see fzero/machine/factors.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from fzero.collectives import (
    InFlight,
    start_all_to_all,
    start_gather,
    start_reduce,
    start_scatter,
)
from fzero.machine.factors import FactorEncoder, GradientEncoder
from fzero.machine.residual import goes_back
from fzero.ranks.mesh import Axis
from fzero.state import Placement, Setup


class Hop(NamedTuple):
    """One collective of a route, its ranks, and what it sends of what came before."""

    start: Callable[[Sequence[Tensor], Axis], InFlight]
    axis: Axis
    sent: Callable[[int, Tensor], Tensor] | None = None  # of a group; None: it as it is


def route_of(setup: Setup, axis: Axis, encoder: GradientEncoder | None) -> list[Hop]:
    """Return the collectives for a bucket of this state; the first sends `LocalGradients.sent`."""
    scatter = partial(start_scatter, ordered=setup.reduction.ordered)
    reduce = partial(start_reduce, ordered=setup.reduction.ordered)
    if isinstance(encoder, FactorEncoder):
        return [Hop(reduce, axis), Hop(reduce, axis, encoder.sent_back)]
    at_once = encoder is None or setup.reduction.over == "all"
    if encoder is not None and not encoder.codec.linear:
        hops = [Hop(start_all_to_all, axis)]
        if not at_once:
            across = Hop(start_all_to_all, axis.replicas, encoder.sent)
            hops = [Hop(scatter, axis.shards), across]
        if goes_back(setup):
            over = axis if setup.reduces_in_place else axis.replicas
            hops.append(Hop(start_gather, over, encoder.sent_back))
        return hops
    if setup.reduces_in_place:
        return [Hop(reduce, axis)]
    if axis.dims is None:
        return [Hop(scatter, axis.shards)]
    start = scatter if setup.gradients is Placement.OVER_ALL else reduce
    sent = None if at_once or encoder is None else encoder.sent
    return [Hop(scatter, axis.shards), Hop(start, axis.replicas, sent)]
