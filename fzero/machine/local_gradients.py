"""The gradients of one state on this rank, before and after their reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.context.modes import is_recorded
from fzero.machine.bucket import Bucket
from fzero.machine.factors import encoder_of
from fzero.machine.offload import add_to, offloaded
from fzero.machine.route import Hop, route_of
from fzero.ranks.mesh import Axis
from fzero.state.layout import as_bits
from fzero.state.progress import ALL
from fzero.state.setup import Setup


class LocalGradients:
    """The buckets of one state: filled leaf by leaf, then reduced, then divided into means.

    Attributes:
        keeps: whether they stay on this rank, for a coalescing window.
        means: {group: its mean over ranks} of what was reduced.
        encoder: what encodes them where they cross ranks; None if nothing does.
        route: the collectives that sum them.
    """

    def __init__(
        self, setup: Setup, axis: Axis, route: list[Hop] | None, device: torch.device
    ) -> None:
        self.setup, self.axis, self._device = setup, axis, device
        layout, contiguous = setup.layout, setup.reduction.contiguous_gradients
        self.buckets = {i: Bucket(layout, i, contiguous=contiguous) for i in layout.trainable}
        self.encoder = None if route is not None else encoder_of(setup)
        self.route = route_of(setup, axis, self.encoder) if route is None else route
        self.keeps = False
        self.means: dict[int, Tensor] = {}
        self._used: set[int] = set()

    def add(self, leaf: int, index: int, position: int, gradient: Tensor) -> None:
        """Add the gradient of one leaf, which is at `position` in group `index`."""
        self.buckets[index].add(position, gradient)
        self._used.add(leaf)

    def begin(self, setup: Setup, *, keeps: bool) -> None:
        """A backward begins: `setup` says how its gradients are summed."""
        self.setup, self.keeps = setup, keeps

    def sent(self, index: int, *, mine: bool) -> Tensor:
        """Return what this rank sends for one group; zeros without a gradient, or if not `mine`."""
        setup, encoder = self.setup, self.encoder
        if setup.reduction.over == "replicas":
            encoder = None  # until it is reduced over the shards
        gradient, bucket = None, self.buckets[index]
        if mine and _in_place(setup):
            gradient = bucket.pop_owned(setup.divides_first(index), self._device)
        elif mine:
            gradient = bucket.pop(device=self._device)
        if gradient is None:
            dtype = setup.communication_dtype(index)
            numel = setup.layout.full_numel(index)
            gradient = torch.zeros(numel, dtype=dtype, device=self._device)
            return gradient if encoder is None else encoder.sent(index, gradient, mine=mine)
        if encoder is None:
            return setup.sent(index, gradient)
        return encoder.sent(index, gradient)

    def add_sum(self, index: int, got: Tensor) -> None:
        """Divide a sum over ranks by W, unless packing did; add it to the mean of the group."""
        setup = self.setup
        if self.encoder is not None:
            got = self.encoder.result(index, got)
        mean = got.to(setup.accumulate_dtype(index))
        first = setup.divides_first(index) if _in_place(setup) else 1.0
        if (divisor := setup.divisor / first) != 1.0:
            mean.div_(divisor)
        home = setup.offload.gradients
        if index in self.means:
            self.means[index].add_(mean) if home is None else add_to(self.means[index], mean)
        else:
            self.means[index] = mean if home is None else offloaded(home, mean, setup.offload)

    # What is here.

    @property
    def has_any(self) -> bool:
        """Whether any of this rank's own gradients are not yet reduced."""
        return any(bucket.has_any for bucket in self.buckets.values())

    def pop_local(self, *, to_write: bool = False) -> dict[int, Tensor]:
        """Remove and return this rank's own unreduced gradients: {group: [W l]}.

        `to_write`: later gradients are added to them in place.
        """
        written = set[int]() if to_write else None
        found = {}
        for index, bucket in self.buckets.items():
            flat = bucket.pop(written)
            if flat is not None:
                found[index] = flat.to(self.setup.accumulate_dtype(index))
        return found

    def pop_local_into(self, totals: dict[int, Tensor], factor: float) -> None:
        """totals[group] += factor * `pop_local()`[group], without a copy in between."""
        for index, total in totals.items():
            self.buckets[index].pop_into(total, factor)

    def pop_means(self) -> dict[int, Tensor]:
        """Remove and return the means: {group: this rank's part of it}."""
        means, self.means = self.means, {}
        return means

    def pop_used(self) -> int:
        """Remove and return the leaves that got a gradient, as bits; `ALL` if all did."""
        used, self._used = self._used, set()
        layout = self.setup.layout
        count = sum(len(layout.groups[i].leaves) for i in self.buckets)
        return ALL if len(used) == count else as_bits(used)

    def discard_local(self) -> None:
        """Discard the gradients that are not yet in a reduction."""
        self.pop_local()
        self._used.clear()

    def discard(self) -> None:
        """Discard everything."""
        self.discard_local()
        self.means = {}
        if self.encoder is not None:
            self.encoder.discard()


def _in_place(setup: Setup) -> bool:
    """Whether gradients are summed in the memory that is sent.

    In a graph none are, and what divides them after the sum is compiled into the update.
    """
    return setup.reduces_in_place and not is_recorded(())
