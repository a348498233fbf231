"""Launches buckets: this rank's gradients -> a collective that runs beside the backward -> rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from fzero.adapter._bucket import Bucket, Contiguous, Pending, PerParameter
from fzero.adapter._exchange import Ask
from fzero.adapter._options import Reduction
from fzero.adapter._plan import Plan
from fzero.adapter._source import Source
from fzero.collectives import InFlight, exchange_ids, start_reduce, start_scatter
from fzero.errors import AxisError
from fzero.state import Placement
from fzero.state.buffers import SIXTEEN_BIT


class Reducer:
    """The buckets of one engine, in launch order, and their collectives in flight."""

    def __init__(
        self,
        plan: Plan,
        buckets: Sequence[Bucket],
        options: Reduction,
        source: Source | None,
    ) -> None:
        self.plan, self.buckets, self.source = plan, buckets, source
        self._ordered, self._overlap = options.ordered, options.overlap
        self._numbers = {bucket.index: number for number, bucket in enumerate(buckets)}
        self._flights: list[tuple[Bucket, InFlight]] = []
        self._absorbed = False

    def launch(self, numbers: Sequence[int]) -> None:
        """Start the reduction of these buckets; at stage 3, and of what other ranks ask for."""
        if self.plan.axis.size == 1:
            self._absorb(numbers)
        elif self.source is None:
            for number in numbers:
                self._start(self.buckets[number], mine=True)
        else:
            groups = [self.buckets[number].index for number in numbers]
            self.source.exchange.ask(Ask.REDUCE, groups)

    def launch_nothing(self, numbers: Sequence[int]) -> None:
        """Take part, below stage 3, in what the other ranks reduce; keep all that is here."""
        for number in numbers:
            self._start(self.buckets[number], mine=False)

    def serve(self, what: Ask, group: int, mine: bool) -> None:
        """Start one collective that the ranks have agreed on."""
        if what is Ask.REDUCE:
            self._start(self.buckets[self._numbers[group]], mine=mine)
        elif self.source is not None:
            self.source.start(group, mine)

    def meet(self, value: int) -> list[int]:
        """Return the `value` of every rank, once all have come here."""
        if self.plan.axis.size == 1:
            return [value]
        if self.source is None:
            return exchange_ids(value, self.plan.axis)
        return self.source.exchange.meet(value)

    def finish(self) -> bool:
        """The backward is over; False if nothing was launched in it.

        At stage 3, serves the others until no rank asks for more. Below, what was launched goes
        on beside whatever comes next, until `settle`: a rank that waited here could not serve
        another engine, whose backward may still run on other ranks.
        """
        if self.source is not None:
            self.source.exchange.finish()
        absorbed, self._absorbed = self._absorbed, False
        launched = bool(self._flights) or absorbed
        if self.source is not None:
            self.settle()
        return launched

    def settle(self) -> None:
        """Wait for what was launched, in that order, and add its mean to the gradients."""
        flights, self._flights = self._flights, []
        for bucket, flight in flights:
            bucket.add(flight.wait()[0].div_(self.plan.axis.size))

    def _absorb(self, numbers: Sequence[int]) -> None:
        """One rank alone: its gradients are the mean already."""
        for number in numbers:
            local = self.buckets[number].collect()
            if local is not None:
                self.buckets[number].add(local)
                self._absorbed = True

    def abandon(self) -> None:
        """Forget what is in flight, after an error. Starts no collective."""
        flights, self._flights = self._flights, []
        for _, flight in flights:
            with suppress(AxisError):
                flight.wait()

    def keep(self) -> bool:
        """Let what is pending wait on this rank; False if nothing was."""
        return any([bucket.keep() for bucket in self.buckets if bucket.pending.some])

    def waiting(self) -> frozenset[int]:
        """The buckets with gradients that wait on this rank, from before or from this backward."""
        return frozenset(n for n, bucket in enumerate(self.buckets) if bucket.waits)

    def drop(self) -> None:
        """Forget what this backward brought."""
        for bucket in self.buckets:
            bucket.pending.drop()

    def clear(self) -> None:
        """Forget every gradient."""
        for bucket in self.buckets:
            bucket.clear()

    def _start(self, bucket: Bucket, *, mine: bool) -> None:
        local = bucket.take() if mine else bucket.nothing()
        axis = self.plan.axis
        if self.plan.placement is Placement.SHARDED:
            flight = start_scatter([local], axis, ordered=self._ordered)
        else:
            flight = start_reduce([local], axis, ordered=self._ordered)
        self._flights.append((bucket, flight))
        if not self._overlap:  # its rows are added at the end, for the backward may still raise
            flight.wait()


def make_buckets(plan: Plan, options: Reduction) -> list[Bucket]:
    """One bucket for each group that learns, in launch order.

    Gradients of 16-bit parameters add up in fp32 unless `accumulate_dtype` says otherwise; they
    cross ranks in the dtype of the parameters unless `communication_dtype` does.
    """
    made = []
    for index in plan.buckets:
        group = plan.layout.groups[index]
        wide = torch.float32 if group.dtype in SIXTEEN_BIT else group.dtype
        pending: Pending = PerParameter(plan.layout, index)
        if options.contiguous_gradients and len(group.leaves) > 1:
            pending = Contiguous(plan.layout, index, plan.device)
        made.append(
            Bucket(
                plan.layout,
                index,
                pending,
                accumulate=options.accumulate_dtype or wide,
                wire=options.communication_dtype or group.dtype,
                device=plan.device,
            )
        )
    return made
