"""The update: reduced gradients -> a torch.optim optimizer on this rank's rows -> parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fzero.adapter._bucket import Bucket
from fzero.adapter._parameters import Parameters
from fzero.adapter._plan import Plan
from fzero.collectives import start_gather_in_place
from fzero.state import Placement
from fzero.state.buffers import SIXTEEN_BIT


class Rows:
    """What the optimizer steps: one flat parameter for each group that has an optimizer.

    It is this rank's part of the parameters themselves, or with `masters` an fp32 copy of it
    where they have 16 bits.
    """

    def __init__(self, plan: Plan, parameters: Parameters, *, masters: bool) -> None:
        self.plan, self._parameters = plan, parameters
        self.of: dict[int, nn.Parameter] = {}
        self.masters: list[int] = []
        self.fused: Sequence[int] = ()  # the optimizer's groups that have fused kernels until close
        for index, stepper in enumerate(plan.steppers):
            rows = parameters.rows[index]
            if stepper < 0:
                continue
            if masters and rows.dtype in SIXTEEN_BIT:
                self.of[index] = nn.Parameter(rows.detach().float())
                self.masters.append(index)
            elif plan.axis.size == 1:
                self.of[index] = parameters.first_of(index, 0)  # type: ignore[assignment]
            else:
                self.of[index] = nn.Parameter(rows)
        self._everything = [
            p
            for index in self.of
            for position in range(len(plan.layout.groups[index].leaves))
            for p in parameters.objects(index, position)
        ]

    @property
    def stepped(self) -> Iterable[int]:
        """The groups that the optimizer steps."""
        return self.of.keys()

    def groups(self) -> list[list[nn.Parameter]]:
        """The rows of each of the optimizer's parameter groups."""
        found: list[list[nn.Parameter]] = [[] for _ in self.plan.param_groups]
        for index, p in self.of.items():
            if p.numel():
                found[self.plan.steppers[index]].append(p)
        return found

    @torch.no_grad()
    def take_written(self, indices: Iterable[int] | None = None) -> None:
        """Let masters follow parameters that somebody wrote to since the last `publish`.

        By their values: a write through `p.data` leaves no other trace.
        """
        for index in self.masters if indices is None else set(self.masters) & set(indices):
            rows, master = self._parameters.rows[index], self.of[index]
            if not torch.equal(rows, master.to(rows.dtype)):
                changed = rows != master.to(rows.dtype)  # the others keep their low bits
                master.copy_(torch.where(changed, rows.to(master.dtype), master))

    @torch.no_grad()
    def publish(self) -> None:
        """Make the new values those of the module's parameters, on every rank."""
        for index in self.masters:
            self._parameters.rows[index].copy_(self.of[index])
        sharded = self.plan.placement is Placement.SHARDED and not self.plan.shards_params
        if sharded and self.of:
            flats = [self._parameters.flats[index] for index in self.of]
            start_gather_in_place(flats, self.plan.axis).wait()
        # A graph from before the update must not be differentiated with the new values: autograd
        # then says so, as it does for an optimizer that writes to the parameters themselves.
        torch.autograd.graph.increment_version(self._everything)

    def step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], factor: Tensor | float
    ) -> None:
        """Run the optimizer on gradients x `factor`. If it raises, the gradients are as before."""
        self._parameters.follow_all()
        self.take_written()
        try:
            for bucket in buckets:
                if bucket.index in self.of:
                    p = self.of[bucket.index]
                    gradient = torch.zeros_like(p) if bucket.reduced is None else bucket.reduced
                    if isinstance(factor, Tensor) or factor != 1.0:
                        gradient = gradient * factor
                    p.grad = _fitting(gradient, p)
            optimizer.step()
        finally:
            for p in self.of.values():
                p.grad = None


def _fitting(gradient: Tensor, p: Tensor) -> Tensor:
    """`gradient` in the dtype, shape and memory format of `p`: fused kernels go by the last."""
    same = gradient.dtype == p.dtype and gradient.shape == p.shape
    if same and gradient.stride() == p.stride():
        return gradient
    return torch.empty_like(p, requires_grad=False).copy_(gradient.view(p.shape))
