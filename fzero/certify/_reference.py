"""The one-process step: plain torch autograd and torch.optim on the batches of all ranks.

Nothing of fzero's machine is used here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fzero.certify._axes import Precision
from fzero.certify._exact import is_exact
from fzero.certify._subject import Subject, tensors_of
from fzero.errors import LayoutError
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.layout import learns

OptimizerOf = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is computed, by whatever means."""

    world: int
    micro_batches: int
    updates: int
    precision: Precision
    wire: torch.dtype | None  # bf16 or int8, in which gradients cross ranks; None: their own
    sums: bool  # over ranks; else the mean
    whole_loss: bool  # autocast is around the loss, not around the module's forward alone

    @property
    def summands(self) -> int:
        """How many gradients one update is made of."""
        return self.world * self.micro_batches

    @property
    def divisor(self) -> int:
        """What their sum is divided by."""
        return self.micro_batches if self.sums else self.summands

    @property
    def low(self) -> torch.dtype:
        """The coarsest floating dtype that a gradient passes through."""
        return torch.bfloat16 if self.wire is torch.bfloat16 else self.precision.low

    @property
    def quantizes(self) -> bool:
        """Whether gradients cross ranks as int8 blocks."""
        return self.wire is torch.int8 and self.world > 1

    def batch_number(self, update: int, rank: int, micro_batch: int) -> int:
        """Which batch a rank takes: no two take the same."""
        return (update * self.world + rank) * self.micro_batches + micro_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """What one update must be."""

    losses: Tensor  # [W, N] float64
    norm: float  # of the mean gradient, before clipping
    params: Mapping[str, Tensor]  # after it, also what does not learn
    masters: Mapping[str, Tensor]  # what the optimizer steps: params, or fp32 copies of them
    exact: frozenset[str]  # of the params, which must be equal bit for bit
    exact_losses: bool


class CopyGradient(torch.optim.Optimizer):
    """p' = g: an optimizer that shows the gradient which it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Write each gradient into its parameter; zero where there is none."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.zero_()
                else:
                    p.copy_(p.grad)


def one_process(
    subject: Subject,
    task: Task,
    optimizer: OptimizerOf,
    *,
    max_norm: float | None = None,
    disturbed: bool = False,
) -> list[Update]:
    """Train one copy of the model on the batches of all ranks and micro-batches.

    g = (1 / W N) sum_rn dL_rn/dp, added up in float64; zero for a parameter that no loss uses.

    Args:
        subject: the model, its loss and its batches.
        task: the counts and the precision.
        optimizer: called with the list of parameters that learn.
        max_norm: clip by torch's formula, g min(1, max_norm / (|g| + 1e-6)).
        disturbed: change each gradient by as much as another order of its sum could.

    Raises:
        LayoutError: for a loss that is no finite scalar, or that differs from call to call.
    """
    run = _Run(subject, task, optimizer)
    rounds = max_norm is not None or task.quantizes
    found, good = [], frozenset() if rounds else frozenset(run.masters)
    exact = frozenset(run.tensors)
    for update in range(task.updates):
        losses, parts = run.backwards(update)
        same = len(exact) == len(run.tensors)  # the losses are of equal parameters
        good = frozenset(p for p in good if is_exact(parts[p], _divisor(task), task.low))
        mean = {path: torch.stack(terms).sum(0) / task.divisor for path, terms in parts.items()}
        norm = float(torch.stack([g.square().sum() for g in mean.values()]).sum().sqrt())
        if disturbed:
            _disturb(mean, parts, good, task, update)
            norm *= 1 + _rounding(task)  # not that of the disturbed gradients: it would hide them
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        before = {path: master.detach().clone() for path, master in run.masters.items()}
        run.step(mean, factor)
        exact = _exact_params(run, before, good, task)
        found.append(
            Update(
                losses=losses,
                norm=norm,
                params={path: p.detach().clone() for path, p in run.tensors.items()},
                masters={path: p.detach().clone() for path, p in run.masters.items()},
                exact=exact,
                exact_losses=same and is_exact([losses], _divisor(task), task.precision.low),
            )
        )
    return found


class _Run:
    """A model under training, in one process."""

    def __init__(self, subject: Subject, task: Task, optimizer: OptimizerOf) -> None:
        self.subject, self.task = subject, task
        self.model = subject.copy(task.precision.dtype)
        self.tensors = tensors_of(self.model)
        self.learning = {path: p for path, p in self.tensors.items() if learns(p)}
        for p in self.learning.values():
            p.requires_grad_()
        masters = task.precision.masters
        self.masters = {p: nn.Parameter(_stepped(x, masters)) for p, x in self.learning.items()}
        self.optimizer = optimizer(list(self.masters.values()))

    def backwards(self, update: int) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """The losses [W, N], and of each parameter the gradients by all of them, in float64."""
        task = self.task
        losses = torch.zeros(task.world, task.micro_batches, dtype=torch.float64)
        parts: dict[str, list[Tensor]] = {path: [] for path in self.learning}
        for rank in range(task.world):
            for n in range(task.micro_batches):
                loss = self.loss(task.batch_number(update, rank, n))
                grads = torch.autograd.grad(
                    loss, list(self.learning.values()), allow_unused=True, materialize_grads=True
                )
                losses[rank, n] = loss.detach().double()
                for path, grad in zip(parts, grads, strict=True):
                    parts[path].append(grad.double())
        return losses, parts

    def loss(self, number: int) -> Tensor:
        """The loss of a batch, in the task's autocast if it has one."""
        batch = self.subject.batch(number, self.task.precision.dtype)
        low = self.task.precision.autocast
        region = nullcontext if low is None else functools.partial(torch.autocast, "cpu", low)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with region():
                return self.model(*args, **kwargs)

        if self.task.whole_loss:
            with region():
                loss = self.subject.loss(self.model, batch)
        else:
            loss = self.subject.loss(forward, batch)
        _require_good(loss, number)
        return loss

    def step(self, gradient: Mapping[str, Tensor], factor: float) -> None:
        """Update the masters by the gradient times the factor, and the parameters from them."""
        for path, master in self.masters.items():
            master.grad = (gradient[path] * factor).to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for path, p in self.learning.items():
                p.copy_(self.masters[path])


def require_repeatable(subject: Subject, task: Task) -> None:
    """Raise `LayoutError` for a loss that is another one when it is computed again."""
    run = _Run(subject, task, CopyGradient)
    one, two = run.loss(0).detach(), run.loss(0).detach()
    if not torch.equal(one, two):
        raise LayoutError(
            f"certify: the loss of batch 0 is {float(one)}, and then {float(two)}.",
            cause="dropout, noise, or batches that are drawn anew at each call.",
            fix="call model.eval(), fix the noise, and draw batch i from seed i.",
        )


def _require_good(loss: Any, number: int) -> None:
    scalar = isinstance(loss, Tensor) and loss.numel() == 1
    if scalar and loss.requires_grad and bool(loss.isfinite()):
        return
    seen = f"{loss.detach()!r:.80}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise LayoutError(
        f"certify: in one process the loss of batch {number} is {seen}.",
        cause="a loss that is not reduced to one number, is detached, or is not finite.",
        fix="return a finite scalar that the parameters made; if it grows, give a smaller lr.",
    )


def _divisor(task: Task) -> int:
    # A loss that is divided by N is differentiated from 1 / N on: exact for powers of two alone.
    return task.summands if _is_power_of_two(task.micro_batches) else 2**62 - 1


def _is_power_of_two(number: int) -> bool:
    return not number & (number - 1)


def _disturb(
    mean: dict[str, Tensor],
    parts: Mapping[str, Sequence[Tensor]],
    exact: frozenset[str],
    task: Task,
    update: int,
) -> None:
    """Change each gradient by what another order of its sum could.

    Towards zero: so the loss moves most, and what is nearly zero changes its sign.
    """
    sizes = {path: float(_size(terms, task.divisor)) for path, terms in parts.items()}
    largest, scale = max(sizes.values()), _rounding(task)
    for path, gradient in mean.items():
        if path not in exact and gradient.numel():
            # what cancels inside of a backward leaves rounding of the size of other gradients
            size = scale * (sizes[path] + largest / 16)
            if task.quantizes:  # what one update loses is made up for in the next: e, -2e, 2e, ...
                size = scale * largest * (-1) ** update * (2 if update else 1)
            mean[path] = gradient - size * torch.where(gradient > 0, 1.0, -1.0)


def _rounding(task: Task) -> float:
    """What another order of a sum may change, relative to the size of its terms."""
    low = task.low
    if task.quantizes:  # twice the half of a level
        return 1 / 127
    if low not in SIXTEEN_BIT:  # each sum rounds
        return torch.finfo(low).eps * 16 * task.summands
    # a term is rounded once or twice on its way; divided by 3, its whole backward rounds otherwise
    return torch.finfo(low).eps * (2 if _is_power_of_two(task.micro_batches) else 4)


def _size(terms: Sequence[Tensor], divisor: int) -> Tensor:
    total = torch.stack([term.abs() for term in terms]).sum(0) / divisor
    return total.max() if total.numel() else total.sum()


def _exact_params(
    run: _Run, before: Mapping[str, Tensor], good: frozenset[str], task: Task
) -> frozenset[str]:
    """The parameters that must be equal bit for bit; what does not learn is always so."""
    low = task.precision.low
    short = {path for path in good if is_exact([before[path], run.masters[path]], 1, low)}
    return frozenset(path for path in run.tensors if path not in run.masters or path in short)


def _stepped(p: Tensor, masters: bool) -> Tensor:
    """A copy for the optimizer, of 16-bit parameters in fp32 if they have `masters`."""
    dtype = torch.float32 if masters and p.dtype in SIXTEEN_BIT else p.dtype
    return p.detach().to(dtype, copy=True)
