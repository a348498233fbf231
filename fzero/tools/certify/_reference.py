"""The one-process step: plain torch autograd and torch.optim on the batches of all ranks.

fzero's machine is not used. Each number has a bound of its rounding. The bound e of a gradient
comes from the sizes of its terms; updates from g + e and g - e give, element by element, that of
the parameters; the next gradient at such parameters carries it on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.state.buffers import SIXTEEN_BIT
from fzero.tools.certify._exact import is_exact
from fzero.tools.certify._process import OptimizerOf, Parts, Process, Stepped, Tensors
from fzero.tools.certify._subject import Subject
from fzero.tools.certify._task import Task
from fzero.tools.compare import MARGIN, coarser, copied, eps_of, largest, shift


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedUpdate:
    """The expected values after one update, and their bounds."""

    losses: Tensor  # [W, N] float64
    losses_reach: float  # 0: bit for bit
    norm: float  # of the mean gradient, before clipping
    norm_reach: float
    params: Mapping[str, Tensor]  # after it, also what does not learn
    masters: Mapping[str, Tensor]  # what the optimizer steps: params, or fp32 copies of them
    reach: Mapping[str, Tensor]  # of the masters, element by element
    exact: frozenset[str]  # of the params, which must be equal bit for bit


class CopyGradient(torch.optim.Optimizer):
    """p' = g: an optimizer that writes the gradient into the parameter, to compare it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Write each gradient into its parameter, which stays where there is none."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(p.grad)


class Keep(torch.optim.Optimizer):
    """p' = p: what changes a parameter beside it is no gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


def one_process(
    subject: Subject,
    task: Task,
    optimizer: OptimizerOf,
    *,
    max_norm: float | None = None,
    mixes: bool = False,
) -> list[ExpectedUpdate]:
    """Train one copy of the model on the batches of all ranks and micro-batches.

    g = (1 / W N) sum_rn dL_rn/dp, added up in float64. A parameter that no loss uses is stepped by
    zeros, or not at all, as the task says.

    Args:
        subject: the model, its loss and its batches.
        task: the counts and the precision.
        optimizer: called with the list of parameters that learn.
        max_norm: clip by torch's formula, g min(1, max_norm / (|g| + 1e-6)).
        mixes: the optimizer makes of one element's error errors of others of its parameter.

    Raises:
        LayoutError: for a loss that is no finite scalar.
    """
    process = Process(subject, task.precision, task.whole_loss)
    signs = SIGNS_OF_MEMORY if task.loses and task.remembers else SIGNS
    made = [Stepped(process.learning, task.precision, optimizer) for _ in range(1 + len(signs))]
    centre, corners = made[0], made[1:]
    reach = {path: torch.zeros(p.shape).double() for path, p in centre.masters.items()}
    rounds = max_norm is not None or task.loses > 0 or task.pieces > 1  # inside of a loss
    found, good = [], frozenset() if rounds else frozenset(reach)
    exact, left = frozenset(process.tensors), 0.0
    for update in range(task.updates):
        before = centre.copied()
        passed = _Passed(process, task, update, before, reach)
        good = passed.exact(good)
        mean, error = passed.mean, passed.error(good, clips=max_norm is not None)
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (passed.norm + 1e-6))
        stepped = {path: g for path, g in mean.items() if task.steps_unused or path in passed.used}
        centre.step({path: g * factor for path, g in stepped.items()})
        before_it, left = left, passed.left(left)
        for of_corner, corner in zip(signs, corners, strict=True):
            off = {p: of_corner.off(update, error[p], left, before_it) for p in stepped}
            corner.step({path: (g + off[path]) * factor for path, g in stepped.items()})
        process.follow(centre.masters)
        # the losses are of equal parameters, and nothing is added up in another order in them
        same = len(exact) == len(process.tensors) and task.pieces == 1
        reach = _reach(centre, corners, mixes=mixes)
        exact = _exact_params(process, before, centre.masters, good, task)
        found.append(
            ExpectedUpdate(
                losses=passed.losses,
                losses_reach=passed.losses_reach(same),
                norm=passed.norm,
                norm_reach=passed.norm_reach,
                params=copied(process.tensors),
                masters=centre.copied(),
                reach=reach,
                exact=exact,
            )
        )
    return found


RESIDUE = 64.0  # roundings of the largest gradient, below which nothing is taken for exact


class _Signs(NamedTuple):
    """With which signs bounds are taken in even and odd updates, in one corner."""

    error: tuple[int, int]  # of a gradient
    left: tuple[int, int] = (0, 0)  # of what an update leaves to the next one, which has it back

    def off(self, update: int, error: Tensor, left: float, before_it: float) -> Tensor:
        """Return how far the gradient of an update is off."""
        now, last = update % 2, (update + 1) % 2
        return self.error[now] * error + self.left[last] * before_it - self.left[now] * left


SIGNS = tuple(_Signs(error) for error in ((1, 1), (-1, -1), (1, -1), (-1, 1)))
SIGNS_OF_MEMORY = tuple(
    _Signs((sign, sign), (first, second))
    for sign, first, second in itertools.product((-1, 1), (-1, 0, 1), (-1, 0, 1))
    if first or second
)


class _Passed:
    """The losses and gradients of one update, and those from parameters within their bounds."""

    def __init__(
        self, process: Process, task: Task, update: int, values: Tensors, reach: Tensors
    ) -> None:
        self.process, self.task, self.update, self.values = process, task, update, values
        self.numbers = task.numbers(update)
        self.losses, parts = process.backwards(self.numbers)
        self.parts = _weighted(parts, task)
        self.used = process.used
        self.other: tuple[Tensor, Parts] | None = None
        if any(bool(x.any()) for x in reach.values()):
            other_losses, other = process.displaced(self.numbers, values, reach)
            self.other = other_losses, _weighted(other, task)
        self.low = coarser(task.low, process.coarsest)
        self.mean = _mean(self.parts, task.divisor)
        self.mean_of_other = self.mean if self.other is None else _mean(self.other[1], task.divisor)
        self.norm = _norm(self.mean)

    def exact(self, good: frozenset[str]) -> frozenset[str]:
        """Return those of `good` whose gradient must be equal bit for bit.

        Excluded are gradients that change within the bounds of the parameters, and residues of
        cancellation inside of a loss, which have few bits too, but other ones in another order.
        """
        found = frozenset(p for p in good if is_exact(self.parts[p], _divisor(self.task), self.low))
        if self.other is not None:
            found = frozenset(p for p in found if _same(self.parts[p], self.other[1][p]))
        top = max(largest(terms) for terms in self.parts.values())
        return frozenset(p for p in found if not self._is_residue(p, top))

    def _is_residue(self, path: str, top: float) -> bool:
        """Return whether an element may be a residue of cancelled terms of size `top`."""
        sizes = torch.stack(self.parts[path]).abs()
        return bool(((sizes > 0) & (sizes <= RESIDUE * eps_of(self.low) * top)).any())

    def error(self, good: frozenset[str], *, clips: bool) -> dict[str, Tensor]:
        """Return the bound of each gradient; 0 for those of `good`."""
        sizes = {path: _size(terms, self.task.divisor) for path, terms in self.parts.items()}
        top, scale = max(sizes.values()), _rounding(self.task, self.low)
        gone = _norm({p: g - self.mean_of_other[p] for p, g in self.mean.items()})
        relative = gone / self.norm if self.norm else 0.0
        found = {}
        for path, mean in self.mean.items():
            own = largest([mean - self.mean_of_other[path]])
            # what cancels inside of a backward leaves rounding of the size of other gradients
            size = scale * (sizes[path] + top / 16) + MARGIN * max(own, relative * sizes[path])
            size += 0.0 if self.task.remembers else self.task.loses * top
            found[path] = torch.full_like(mean, 0.0 if path in good else size)
            if clips and self.norm:
                found[path] += mean.abs() * self.norm_reach / self.norm
        return found

    def left(self, before: float) -> float:
        """Return the bound of what encoding keeps from this update for the next one.

        before: that of the update before, which is encoded with this one.
        """
        top = max(_size(terms, self.task.divisor) for terms in self.parts.values())
        return self.task.loses * (top + before) if self.task.remembers else 0.0

    @property
    def norm_reach(self) -> float:
        """The bound of the norm."""
        moved = MARGIN * abs(self.norm - _norm(self.mean_of_other))
        scale = 3 * _rounding(self.task, self.low) + _relative(self.task, self.low)
        scale += 3 * self.task.loses
        return scale * self.norm + moved

    def losses_reach(self, same: bool) -> float:
        """Return the bound of a loss; `same`: both losses are of equal parameters."""
        low = coarser(self.task.precision.low, self.process.coarsest)
        if same and is_exact([self.losses], _divisor(self.task), low):
            return 0.0
        other = self.losses if self.other is None else self.other[0]
        moved = MARGIN * largest([self.losses - other])
        return float(self.losses.abs().max()) * _relative(self.task, low) + moved


def _reach(centre: Stepped, corners: Sequence[Stepped], *, mixes: bool) -> dict[str, Tensor]:
    """Return the bound of each element of the masters; if a rule `mixes`, that of the largest."""
    found = {}
    for path, master in centre.masters.items():
        offs = [shift(master.detach(), corner.masters[path].detach()) for corner in corners]
        reach = torch.stack(offs).amax(0)
        found[path] = torch.full_like(reach, MARGIN * largest([reach])) if mixes else reach
    return found


def _weighted(parts: Parts, task: Task) -> Parts:
    """Return w g for each gradient."""
    pairs = {path: zip(task.weights, terms, strict=True) for path, terms in parts.items()}
    return {path: [w * term for w, term in terms] for path, terms in pairs.items()}


def _mean(parts: Parts, divisor: float) -> dict[str, Tensor]:
    return {path: torch.stack(terms).sum(0) / divisor for path, terms in parts.items()}


def _norm(gradient: Tensors) -> float:
    return float(torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt())


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _divisor(task: Task) -> int:
    # A loss that is divided by N is differentiated from 1 / N on: exact for powers of two alone.
    if task.ragged:
        return sum(task.weights)
    return task.summands if _is_power_of_two(task.micro_batches) else 2**62 - 1


def _is_power_of_two(number: int) -> bool:
    return not number & (number - 1)


def _rounding(task: Task, low: torch.dtype) -> float:
    """Return the bound for another order of a sum, relative to the size of its terms."""
    if low not in SIXTEEN_BIT:  # each sum rounds
        return eps_of(low) * 16 * task.summands * task.pieces
    # a term is rounded once or twice on its way; divided by 3, its whole backward rounds otherwise
    return eps_of(low) * (2 if _is_power_of_two(task.micro_batches) else 4)


def _relative(task: Task, low: torch.dtype) -> float:
    """Return the relative bound of one number, a loss or a norm."""
    return eps_of(low) * (4 if low in SIXTEEN_BIT else 64 * task.summands * task.pieces)


def _size(terms: Sequence[Tensor], divisor: float) -> float:
    return largest([torch.stack([term.abs() for term in terms]).sum(0) / divisor])


def _exact_params(
    process: Process, before: Tensors, masters: Tensors, good: frozenset[str], task: Task
) -> frozenset[str]:
    """Return the parameters that must be equal bit for bit, among them all frozen ones."""
    low = task.precision.low
    short = {path for path in good if is_exact([before[path], masters[path]], 1, low)}
    return frozenset(path for path in process.tensors if path not in masters or path in short)
