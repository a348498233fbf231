"""Train a plain copy of the model in one process, and again from perturbed values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.layout import learns
from fzero.tools.certify._axes import RunDtypes
from fzero.tools.certify._reads import alone_on
from fzero.tools.certify._seed import seeded
from fzero.tools.certify._subject import CalledModule, Subject, tensors_of
from fzero.tools.compare import Coarsest, coarser, copied, signs_like

OptimizerOf = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Tensors = Mapping[str, Tensor]
Parts = dict[str, list[Tensor]]  # of each parameter, the gradients of all losses


class Stepped:
    """An optimizer and its parameters, 16-bit ones as fp32 masters."""

    def __init__(self, learning: Tensors, precision: RunDtypes, optimizer: OptimizerOf) -> None:
        masters = precision.masters
        self.masters = {path: nn.Parameter(_copy(p, masters)) for path, p in learning.items()}
        if isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError("an optimizer of other parameters; give its class, or a partial of it")
        self.optimizer = optimizer(list(self.masters.values()))

    def step(self, gradient: Tensors) -> None:
        """Update the masters that have a gradient; one without elements has nothing to update.

        (torch's Adafactor divides by the number of elements.)
        """
        for path, master in self.masters.items():
            has = path in gradient and master.numel()
            master.grad = gradient[path].to(master.dtype) if has else None
        self.optimizer.step()

    def copied(self) -> dict[str, Tensor]:
        """Return clones of the masters."""
        return copied(self.masters)


class Process:
    """A model in training on one process. `numbers` [W][N] are the numbers of batches.

    whole_loss: autocast is around the loss, and not around the module's forward alone.
    """

    def __init__(self, subject: Subject, precision: RunDtypes, whole_loss: bool) -> None:
        self.subject, self.precision, self.whole_loss = subject, precision, whole_loss
        self.model, self.tensors, self.learning = _made(subject, precision)
        self.twin: Any = None
        self.coarsest = torch.float64  # that a number of a loss passes through
        self.used: set[str] = set()

    def backwards(self, numbers: Sequence[Sequence[int]]) -> tuple[Tensor, Parts]:
        """Return losses [W, N] and, for each parameter, the gradients of all losses, in float64.

        `used` are then the parameters that any of them has used.
        """
        self.used = set()
        with alone_on(self.subject.names):
            return self._backwards(self.model, self.learning, numbers)

    def displaced(
        self, numbers: Sequence[Sequence[int]], values: Tensors, reach: Tensors
    ) -> tuple[Tensor, Parts]:
        """Return the same at parameters that differ by their bounds, up or down."""
        source = torch.Generator().manual_seed(0)
        moved = {path: x + reach[path] * signs_like(x, source) for path, x in values.items()}
        self.twin = self.twin or _made(self.subject, self.precision)
        model, _, learning = self.twin
        _copy_to(learning, moved)
        with alone_on(self.subject.names):
            return self._backwards(model, learning, numbers)

    def follow(self, masters: Tensors) -> None:
        """Set the trainable parameters to these masters."""
        _copy_to(self.learning, masters)

    def loss(self, number: int) -> Tensor:
        """The loss of a batch, in the autocast of the precision if it has one."""
        with alone_on(self.subject.names):
            return self._loss(self.model, number)

    def _backwards(
        self, model: Any, learning: Tensors, numbers: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Parts]:
        losses = torch.zeros(len(numbers), len(numbers[0]), dtype=torch.float64)
        parts: Parts = {path: [] for path in learning}
        for rank, of_rank in enumerate(numbers):
            for n, number in enumerate(of_rank):
                loss = self._loss(model, number)
                grads = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
                losses[rank, n] = loss.detach().double()
                for (path, p), grad in zip(learning.items(), grads, strict=True):
                    self.used |= set() if grad is None else {path}
                    parts[path].append((torch.zeros_like(p) if grad is None else grad).double())
        return losses, parts

    def _loss(self, model: Any, number: int) -> Tensor:
        batch = self.subject.batch(number, self.precision.dtype)
        low = self.precision.autocast
        region = nullcontext if low is None else functools.partial(torch.autocast, "cpu", low)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with region():
                return model(*args, **kwargs)

        coarsest = Coarsest(of_parameters=True)
        with coarsest, seeded(batch):
            if self.whole_loss:
                with region():
                    loss = self.subject.loss(model, batch)
            else:
                loss = self.subject.loss(CalledModule(model, forward), batch)
        self.coarsest = coarser(self.coarsest, coarsest.dtype)
        _require_good(loss, number)
        return loss


def require_repeatable(process: Process) -> None:
    """Raise `LayoutError` if a loss differs when it is computed twice."""
    one, two = process.loss(0).detach(), process.loss(0).detach()
    if not torch.equal(one, two):
        raise LayoutError(
            f"certify: the loss of batch 0 is {float(one)}, and then {float(two)}.",
            cause="batches that are drawn anew at each call, noise that is not torch's, or a "
            "module that its forward changes. (torch's random numbers are drawn from a seed for "
            "each batch.)",
            fix="draw batch i from seed i, and noise by torch.",
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


def _made(subject: Subject, precision: RunDtypes) -> tuple[Any, Tensors, Tensors]:
    """Return a copy of the model, all its tensors, and the trainable ones."""
    model = subject.copy(precision.dtype)
    tensors = tensors_of(model)
    learning = {path: p for path, p in tensors.items() if learns(p)}
    for p in learning.values():
        p.requires_grad_()
    return model, tensors, learning


def _copy_to(learning: Tensors, values: Tensors) -> None:
    with torch.no_grad():
        for path, p in learning.items():
            p.copy_(values[path])


def _copy(p: Tensor, masters: bool) -> Tensor:
    """Return a copy for the optimizer; with `masters` in fp32 for a 16-bit parameter."""
    dtype = torch.float32 if masters and p.dtype in SIXTEEN_BIT else p.dtype
    return p.detach().to(dtype, copy=True)
