"""The collectives that bring a bucket of gradients to its sum, one after another.

plain, stages 1 to 3    reduce-scatter over the shards, then what a mesh of two dims has left
plain, stage 0          all-reduce
logical ranks           all-to-all of parts, which their owners sum by a tree; then gathered where
                        gradients are placed in larger parts
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
    Over,
    start_all_to_all,
    start_gather,
    start_reduce,
    start_scatter,
    start_tree_sum,
)
from fzero.machine.factors import FactorEncoder, GradientEncoder
from fzero.machine.residual import goes_back
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import Placement, Setup


class Hop(NamedTuple):
    """One collective of a route, its ranks, and what it sends of what came before."""

    start: Callable[..., InFlight]  # of tensors and the axis
    axis: Axis
    sent: Callable[[int, Tensor], Tensor] | None = None  # of a group; None: it as it is
    by_group: bool = False  # `start` is given the groups of the tensors, too

    def started(self, tensors: Sequence[Tensor], indices: Sequence[int]) -> InFlight:
        """Start it, for a tensor of each of some groups."""
        groups = (indices,) if self.by_group else ()
        return self.start(tensors, self.axis, *groups)


class ReductionPlan:
    """How gradients of some states are reduced, as far as it is known without any of them.

    Attributes:
        setups, axes: of each state.
        units: for each unit, its state, and those of its groups that learn.
        where: of each state, for each leaf: its unit, its group, its place in the group.
        bounded: for each unit, whether the inputs of few reductions may be alive at once: so it is
            but for all-reduces.
        routes: of each state; None where an encoder, which a pass has of its own, is on the way.
        alone: whether gradients stay where they are.
    """

    def __init__(self, setups: Sequence[Setup], axes: Sequence[Axis]) -> None:
        self.setups, self.axes = setups, axes
        self.units: list[tuple[int, tuple[int, ...]]] = []
        self.where = [self._added(number, setup) for number, setup in enumerate(setups)]
        summed = [one.reduces_in_place and one.logical is None for one in setups]
        self.bounded = [setups[n].encodes_gradients or not summed[n] for n, _ in self.units]
        self.routes = [
            None if setup.encodes_gradients else route_of(setup, axis, None)
            for setup, axis in zip(setups, axes, strict=True)
        ]
        streams = any(setup.streams for setup in setups)
        self.alone = axes[0].runtime is Runtime.LOCAL and not streams

    def _added(self, number: int, setup: Setup) -> dict[int, tuple[int, int, int]]:
        where: dict[int, tuple[int, int, int]] = {}
        learning = set(setup.layout.trainable)
        for unit in setup.layout.units:
            indices = tuple(i for i in unit if i in learning)
            for i in indices:
                for position, leaf in enumerate(setup.layout.groups[i].leaves):
                    where[leaf] = len(self.units), i, position
            self.units.append((number, indices))
        return where


def route_of(setup: Setup, axis: Axis, encoder: GradientEncoder | None) -> list[Hop]:
    """Return the collectives for a bucket of this state; the first sends `LocalGradients.sent`."""
    scatter = partial(start_scatter, ordered=setup.reduction.ordered)
    reduce = partial(start_reduce, ordered=setup.reduction.ordered)
    if setup.logical is not None:

        def by_tree(xs: Sequence[Tensor], axis: Axis, indices: Sequence[int]) -> InFlight:
            return start_nodes(setup, axis, [[x] for x in xs], indices)

        gathers = [Hop(start_gather, over) for over in gathered_over(setup, axis)]
        return [Hop(by_tree, axis, by_group=True), *gathers]
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


def start_nodes(
    setup: Setup, axis: Axis, held: Sequence[Sequence[Tensor]], indices: Sequence[int]
) -> InFlight:
    """Start to sum the nodes of some groups over logical ranks: this rank's nodes of each.

    Given are the parts over all ranks, in the dtypes in which gradients add up.
    """
    assert setup.logical is not None
    parts = tuple(setup.part(Placement.OVER_ALL, rank).index for rank in range(axis.size))
    over = Over(axis, setup.logical.ranks, parts)
    return start_tree_sum(held, over, [setup.accumulate_dtype(i) for i in indices])


def gathered_over(setup: Setup, axis: Axis) -> list[Axis]:
    """The axes over which parts of all ranks are gathered to those that gradients have."""
    if setup.gradients is Placement.OVER_ALL:
        return []
    steps = [axis.replicas, axis.shards] if setup.reduces_in_place else [axis.replicas]
    return [over for over in steps if over.size > 1]
