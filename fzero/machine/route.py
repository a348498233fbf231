"""The collectives that bring a bucket of gradients to its sum, one after another.

plain, stages 1 to 3    reduce-scatter over the shards, then what a mesh of two dims has left
plain, stage 0          all-reduce
encoded                 see fzero/machine/encode.py; of "replicas", after the reduce-scatter
as factors              two all-reduces: see fzero/machine/factors.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """One collective of a route: how it starts, and what it sends of what came before."""

    start: Callable[[Sequence[Tensor]], InFlight]
    sent: Callable[[int, Tensor], Tensor] | None = None  # of a group; None: it as it is


def route_of(setup: Setup, axis: Axis, encoder: GradientEncoder | None) -> list[Hop]:
    """Return the collectives for a bucket of this state; the first sends `LocalGradients.sent`."""
    ordered = setup.reduction.ordered

    def scatter(over: Axis) -> Callable[[Sequence[Tensor]], InFlight]:
        return lambda xs: start_scatter(xs, over, ordered=ordered)

    def reduce(over: Axis) -> Callable[[Sequence[Tensor]], InFlight]:
        return lambda xs: start_reduce(xs, over, ordered=ordered)

    def exchange(over: Axis) -> Callable[[Sequence[Tensor]], InFlight]:
        return lambda xs: start_all_to_all(xs, over)

    if isinstance(encoder, FactorEncoder):
        return [Hop(reduce(axis)), Hop(reduce(axis), encoder.sent_back)]
    across = scatter if setup.gradients is Placement.OVER_ALL else reduce
    at_once = encoder is None or setup.reduction.over == "all"
    if encoder is not None and not encoder.codec.linear:
        hops = [Hop(exchange(axis))]
        if not at_once:
            hops = [Hop(scatter(axis.shards)), Hop(exchange(axis.replicas), encoder.sent)]
        if goes_back(setup):
            over = axis if setup.reduces_in_place else axis.replicas
            hops.append(Hop(lambda xs: start_gather(xs, over), encoder.sent_back))
        return hops
    if setup.reduces_in_place:
        return [Hop(reduce(axis))]
    if axis.dims is None:
        return [Hop(scatter(axis.shards))]
    sent = None if at_once or encoder is None else encoder.sent
    return [Hop(scatter(axis.shards)), Hop(across(axis.replicas), sent)]
