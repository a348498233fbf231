"""The one-process step: plain torch autograd and torch.optim on the batches of all ranks.

fzero's machine is not used. Each number has a bound of its rounding. The bound e of a gradient
comes from the sizes of its terms; updates from g + e and g - e give, element by element, that of
the parameters; the next gradient at such parameters carries it on.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.optim import from_torch
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.layout import learns
from fzero.tools import rounding
from fzero.tools.certify.matrix import CellDifference, Check, RunDtypes
from fzero.tools.certify.subject import CalledModule, Subject, seeded, tensors_of
from fzero.tools.trees import copied

OptimizerOf = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
Tensors = Mapping[str, Tensor]
Parts = dict[str, list[Tensor]]  # of each parameter, the gradients of all losses

RESIDUE = 64.0  # roundings of the largest gradient, below which nothing is taken for exact
STORED = 3.0  # times the spacing of numbers at the largest one of a parameter
# With which signs bounds are taken in even and odd updates, in each corner: (of the error of a
# gradient, of what an update leaves to the next one, which has it back).
SIGNS = tuple((error, (0, 0)) for error in ((1, 1), (-1, -1), (1, -1), (-1, 1)))
SIGNS_OF_MEMORY = tuple(
    ((sign, sign), left)
    for sign, left in itertools.product((-1, 1), itertools.product((-1, 0, 1), repeat=2))
    if any(left)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The computation of a cell, for one process and for the ranks."""

    world: int  # the ranks that read other batches
    pieces: int  # in which a batch is cut, each for a rank of its own
    micro_batches: int
    updates: int
    precision: RunDtypes
    low: torch.dtype  # the coarsest floating dtype that a gradient passes through
    loses: float  # what encoding may lose of a gradient, in units of the largest of all
    remembers: bool  # the next update has back what encoding has lost
    sums: bool  # over ranks; else the mean
    ragged: bool  # micro-batches have weights, and their losses are not divided by their number
    whole_loss: bool  # autocast is around the loss, not around the module's forward alone
    steps_unused: bool  # what no rank has used is stepped by zeros, as JAX does and torch does not

    @property
    def summands(self) -> int:
        """How many gradients one update is made of: those of whole batches."""
        return self.world * self.micro_batches

    @property
    def divisor(self) -> float:
        """What their sum is divided by.

        That of a whole batch is the mean over the ranks that have its pieces: their sum is so many
        times it.
        """
        if self.ragged:
            return sum(self.weight(*place) for place in self.places)
        return self.micro_batches / self.pieces if self.sums else self.summands

    @property
    def share(self) -> int:
        """What the loss of a micro-batch is divided by."""
        return 1 if self.ragged else self.micro_batches

    @property
    def places(self) -> list[tuple[int, int]]:
        """(rank, micro-batch) of all batches of an update."""
        return [*itertools.product(range(self.world), range(self.micro_batches))]

    def weight(self, rank: int, micro_batch: int) -> int:
        """Return the weight of a micro-batch: 3, 1, 6, 4, 2, 0, 5 and so on."""
        return (5 * (rank * self.micro_batches + micro_batch) + 3) % 7 if self.ragged else 1

    def batch_number(self, update: int, rank: int, micro_batch: int) -> int:
        """Return the number of a rank's batch, which no other rank or micro-batch takes."""
        return (update * self.world + rank) * self.micro_batches + micro_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedUpdate:
    """The expected values after one update, and their bounds."""

    losses: Tensor  # [W, N] float64
    losses_reach: float  # 0: bit for bit
    norm: float  # of the mean gradient, before clipping
    norm_reach: float
    params: Tensors  # after it, also what does not learn
    masters: Tensors  # what the optimizer steps: params, or fp32 copies of them
    reach: Tensors  # of the masters, element by element
    exact: frozenset[str]  # of the params, which must be equal bit for bit


def one_process(
    subject: Subject, task: Task, optimizer: OptimizerOf, max_norm: float | None = None
) -> list[ExpectedUpdate]:
    """Train one copy of the model on the batches of all ranks and micro-batches.

    g = (1 / W N) sum_rn dL_rn/dp, added up in float64. A parameter that no loss uses is stepped by
    zeros, or not at all, as the task says.

    Args:
        subject: the model, its loss and its batches.
        task: the counts and the precision.
        optimizer: called with the list of parameters that learn.
        max_norm: clip by torch's formula, g min(1, max_norm / (|g| + 1e-6)).

    Raises:
        LayoutError: for a loss that is no finite scalar.
    """
    process = Process(subject, task)
    mixes = _mixes(optimizer, process.tensors)
    signs = SIGNS_OF_MEMORY if task.loses and task.remembers else SIGNS
    centre, *corners = (Stepped(process, optimizer) for _ in range(1 + len(signs)))
    reach = {path: torch.zeros(p.shape).double() for path, p in centre.masters.items()}
    count = task.summands * task.pieces
    divides = bool(task.micro_batches & (task.micro_batches - 1))
    # A loss that is divided by N is differentiated from 1 / N on: exact for powers of two alone.
    whole = int(task.divisor) if task.ragged else 2**62 - 1 if divides else task.summands
    rounds = max_norm is not None or task.loses > 0 or task.pieces > 1  # inside of a loss
    good = frozenset() if rounds else frozenset(reach)
    found, exact, left = list[ExpectedUpdate](), frozenset(process.tensors), 0.0
    for update in range(task.updates):
        # The losses and gradients, and those from parameters that are off by their bounds.
        before = copied(centre.masters)
        losses, parts, used = process.backwards(update)
        other_losses, other = losses, parts
        if any(bool(x.any()) for x in reach.values()):
            source = torch.Generator().manual_seed(0)
            process.set(
                {p: x + reach[p] * rounding.signs_like(x, source) for p, x in before.items()}
            )
            other_losses, other, _ = process.backwards(update)
            process.set(before)
        low = rounding.coarser(task.low, process.coarsest)
        mean, other_mean = (
            {path: torch.stack(terms).sum(0) / task.divisor for path, terms in some.items()}
            for some in (parts, other)
        )
        norm, other_norm = _norm(mean), _norm(other_mean)

        # What must be equal bit for bit. Not so are gradients that change within the bounds of the
        # parameters, and residues of cancellation inside of a loss, which have few bits too, but
        # other ones in another order.
        tiny = (
            RESIDUE
            * rounding.eps_of(low)
            * max(rounding.largest(terms) for terms in parts.values())
        )
        good = frozenset(
            path
            for path in good
            if rounding.is_exact(parts[path], whole, low)
            and (other is parts or all(map(torch.equal, parts[path], other[path])))
            and not any(bool(((x != 0) & (x.abs() <= tiny)).any()) for x in parts[path])
        )

        # The bounds of the norm and of each gradient.
        sizes = {
            path: rounding.largest([torch.stack([x.abs() for x in terms]).sum(0) / task.divisor])
            for path, terms in parts.items()
        }
        top, scale = max(sizes.values()), rounding.sum_bound(low, count, divides=divides)
        of_norm = 3 * scale + rounding.number_bound(low, count) + 3 * task.loses
        norm_reach = of_norm * norm + rounding.MARGIN * abs(norm - other_norm)
        gone = _norm({p: g - other_mean[p] for p, g in mean.items()}) / norm if norm else 0.0
        error = {}
        for path, g in mean.items():
            own = rounding.largest([g - other_mean[path]])
            # what cancels inside of a backward leaves rounding of the size of other gradients
            size = scale * (sizes[path] + top / 16) + rounding.MARGIN * max(own, gone * sizes[path])
            size += 0.0 if task.remembers else task.loses * top
            error[path] = torch.full_like(g, 0.0 if path in good else size)
            if max_norm is not None and norm:
                error[path] += g.abs() * norm_reach / norm

        # The update, and those from gradients that are off by their bounds.
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        stepped = {path: g for path, g in mean.items() if task.steps_unused or path in used}
        centre.step({path: g * factor for path, g in stepped.items()})
        last, left = left, task.loses * (top + left) if task.remembers else 0.0
        now, then = update % 2, (update + 1) % 2
        for (of_error, of_left), corner in zip(signs, corners, strict=True):
            kept = of_left[then] * last - of_left[now] * left
            off = {path: of_error[now] * error[path] + kept for path in stepped}
            corner.step({path: (g + off[path]) * factor for path, g in stepped.items()})
        process.set(centre.masters)
        for path, master in centre.masters.items():
            offs = [rounding.shift(master.detach(), one.masters[path].detach()) for one in corners]
            reach[path] = torch.stack(offs).amax(0)
            if mixes:  # an error of one element is one of all of its parameter
                reach[path] = torch.full_like(
                    reach[path], rounding.MARGIN * rounding.largest([reach[path]])
                )

        # The losses are of equal parameters, and nothing is added up in another order in them.
        low = rounding.coarser(task.precision.low, process.coarsest)
        same = len(exact) == len(process.tensors) and task.pieces == 1
        losses_reach = float(losses.abs().max()) * rounding.number_bound(low, count)
        losses_reach += rounding.MARGIN * rounding.largest([losses - other_losses])
        exact = frozenset(
            path
            for path in process.tensors
            if path not in before
            or (
                path in good
                and rounding.is_exact([before[path], centre.masters[path]], 1, task.precision.low)
            )
        )
        found.append(
            ExpectedUpdate(
                losses=losses,
                losses_reach=0.0
                if same and rounding.is_exact([losses], whole, low)
                else losses_reach,
                norm=norm,
                norm_reach=norm_reach,
                params=copied(process.tensors),
                masters=copied(centre.masters),
                reach=dict(reach),
                exact=exact,
            )
        )
    return found


def _norm(gradient: Tensors) -> float:
    return float(torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt())


def _mixes(optimizer: OptimizerOf, tensors: Tensors) -> bool:
    """Whether a rule looks at a parameter as a whole, as far as fzero finds that by its trial."""
    # Suppressed: one that fzero does not take, for an engine that does. The steps that use it warn.
    with suppress(LayoutError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return not from_torch(optimizer).bind(tensors).elementwise
    return False


class Process:
    """A plain copy of the model in training on one process."""

    def __init__(self, subject: Subject, task: Task) -> None:
        self.subject, self.task = subject, task
        self.model = subject.copy(task.precision.dtype)
        self.tensors = tensors_of(self.model)
        self.learning = {p: x.requires_grad_() for p, x in self.tensors.items() if learns(x)}
        self.coarsest = torch.float64  # that a number of a loss passes through

    def set(self, masters: Tensors) -> None:
        """Set the trainable parameters to these masters."""
        with torch.no_grad():
            for path, p in self.learning.items():
                p.copy_(masters[path])

    def backwards(self, update: int) -> tuple[Tensor, Parts, set[str]]:
        """Return losses [W, N], all weighted gradients of each parameter, and which are used.

        All in float64.
        """
        task, used = self.task, set[str]()
        losses = torch.zeros(task.world, task.micro_batches, dtype=torch.float64)
        parts: Parts = {path: [] for path in self.learning}
        with self.subject.alone():
            for place in task.places:
                loss = self.loss(task.batch_number(update, *place))
                losses[place] = loss.detach().double()
                grads = torch.autograd.grad(loss, [*self.learning.values()], allow_unused=True)
                for (path, p), grad in zip(self.learning.items(), grads, strict=True):
                    used |= set() if grad is None else {path}
                    if grad is not None and grad.layout is not torch.strided:
                        raise NotImplementedError(f"the gradient of {path} is sparse")
                    term = torch.zeros_like(p) if grad is None else grad
                    parts[path].append(term.detach().double() * task.weight(*place))
        return losses, parts, used

    def loss(self, number: int) -> Tensor:
        """The loss of a batch, in the autocast of the precision if it has one."""
        batch = self.subject.batch(number, self.task.precision.dtype)
        low, whole = self.task.precision.autocast, self.task.whole_loss
        region: Any = nullcontext() if low is None else torch.autocast("cpu", low)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with region:
                return self.model(*args, **kwargs)

        called = self.model if whole else CalledModule(self.model, forward)
        outer = region if whole else nullcontext()
        with rounding.Coarsest(of_parameters=True) as mode, seeded(batch), outer:
            loss = self.subject.loss(called, batch)
        self.coarsest = rounding.coarser(self.coarsest, mode.dtype)
        scalar = isinstance(loss, Tensor) and loss.numel() == 1
        if scalar and loss.requires_grad and bool(loss.isfinite()):
            return loss
        seen = f"{loss.detach()!r:.80}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise LayoutError(
            f"certify: in one process the loss of batch {number} is {seen}.",
            cause="a loss that is not reduced to one number, is detached, or is not finite.",
            fix="return a finite scalar that the parameters made; if it grows, give a smaller lr.",
        )


def require_repeatable(subject: Subject, tasks: Sequence[Task]) -> None:
    """Raise `LayoutError` if a loss differs when it is computed twice.

    In the first precision that it can be computed in: in others its cells say that it cannot.
    """
    firsts = [*{task.precision: task for task in reversed(tasks)}.values()]
    one = two = torch.zeros(())
    while firsts:
        process = Process(subject, firsts.pop())
        try:
            with subject.alone():
                one, two = process.loss(0).detach(), process.loss(0).detach()
            break
        except (RuntimeError, NotImplementedError):
            if not firsts:
                raise
    if not torch.equal(one, two):
        raise LayoutError(
            f"certify: the loss of batch 0 is {float(one)}, and then {float(two)}.",
            cause="batches that are drawn anew at each call, noise that is not torch's, or a "
            "module that its forward changes. (torch's random numbers are drawn from a seed for "
            "each batch.)",
            fix="draw batch i from seed i, and noise by torch.",
        )


class Stepped:
    """An optimizer and its parameters, 16-bit ones as fp32 masters."""

    def __init__(self, process: Process, optimizer: OptimizerOf) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError("an optimizer of other parameters; give its class, or a partial of it")
        self.masters: dict[str, nn.Parameter] = {}
        for path, p in process.learning.items():
            widens = process.task.precision.masters and p.dtype in SIXTEEN_BIT
            dtype = torch.float32 if widens else p.dtype
            self.masters[path] = nn.Parameter(p.detach().to(dtype, copy=True))
        self.optimizer = optimizer(list(self.masters.values()))

    def step(self, gradient: Tensors) -> None:
        """Update the masters that have a gradient; one without elements has nothing to update.

        (torch's Adafactor divides by the number of elements.)
        """
        for path, master in self.masters.items():
            has = path in gradient and master.numel()
            master.grad = gradient[path].to(master.dtype) if has else None
        self.optimizer.step()


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


class Keep(CopyGradient):
    """p' = p: what changes a parameter beside it is no gradient."""

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


# The numbers of the ranks beside those of one process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results of one update on one rank."""

    losses: list[Tensor]  # of its micro-batches, as they were computed
    norm: float | None  # as the driver reports it; None if it does not
    params: dict[str, Tensor]
    slots: dict[str, Any]  # what the optimizer keeps, of a run with logical ranks


_Numbers = Iterator[tuple[str, Tensor, rounding.Spread, Any, float]]
"""(path, what is wanted, what the ranks have, its bound, the largest number of its kind)."""


def check(
    what: str,
    wanted: Sequence[ExpectedUpdate],
    ranks: Sequence[Sequence[Seen]],
    places: Sequence[int] = (),
) -> Check:
    """Compare "loss", "norm", or the parameters (any other name) with those of one process.

    `places` says which of the batches each rank has read, of which losses are compared.
    """
    first, top, compared = None, 0.0, False
    for k, update in enumerate(wanted):
        here = [seen[k] for seen in ranks]
        if what == "loss":
            numbers = _losses(update, here, places)
        else:
            numbers = _norms(update, here) if what == "norm" else _params(update, here)
        for path, theirs, found, bound, size in numbers:
            compared, bound = True, torch.as_tensor(bound).reshape(-1)
            top = max(top, rounding.largest([bound]) / max(size, 1e-300))
            apart = (
                None if first else rounding.first_apart(rounding.whole_leaf(theirs), found, bound)
            )
            first = first or (
                apart
                and CellDifference(
                    update=k + 1,
                    rank=apart.ranks[0],
                    parameter=path,
                    index=apart.index,
                    found=apart.b,
                    wanted=apart.a,
                    bound=apart.bound,
                )
            )
    return Check(what=what, compared=compared, bound=top, difference=first)


def _params(update: ExpectedUpdate, ranks: Sequence[Seen]) -> _Numbers:
    """Yield the parameters of the ranks with those expected, after an update.

    One in the dtype of a master is compared with it.
    """
    size = rounding.largest([*update.params.values()])
    for path, wanted in update.params.items():
        dtypes = {seen.params[path].dtype for seen in ranks if path in seen.params}
        if path in update.masters and wanted.dtype not in dtypes:
            wanted = update.masters[path]
        copies = []
        for rank, seen in enumerate(ranks):
            found = seen.params.get(path)
            if found is None or found.shape != wanted.shape:
                found = torch.full(wanted.shape, torch.nan)
            copies.append(rounding.Copy(rank, 0, found.reshape(-1)))
        bound: Any = 0.0
        if path not in update.exact and wanted.numel():
            bound = update.reach[path] + STORED * rounding.eps_of(wanted.dtype) * rounding.largest(
                [wanted]
            )
        yield path, wanted, rounding.Spread(tuple(wanted.shape), tuple(copies)), bound, size


def _losses(update: ExpectedUpdate, ranks: Sequence[Seen], places: Sequence[int]) -> _Numbers:
    """Yield the mean loss of each rank, or of the ranks with the pieces of a batch."""
    size = rounding.largest([update.losses])
    for place, wanted in enumerate(update.losses):
        sharing = [rank for rank, its in enumerate(places) if its == place]
        losses = [loss for rank in sharing for loss in ranks[rank].losses]
        if losses:  # else the step has hidden them
            found = rounding.whole_leaf(torch.stack(losses).double().mean(), sharing[0])
            yield "", wanted.mean(), found, update.losses_reach, size


def _norms(update: ExpectedUpdate, ranks: Sequence[Seen]) -> _Numbers:
    """Yield the norms of the ranks whose driver reports them, with that expected."""
    for rank, seen in enumerate(ranks):
        if seen.norm is not None:
            found, wanted = torch.tensor([seen.norm, update.norm], dtype=torch.float64)
            yield "", wanted, rounding.whole_leaf(found, rank), update.norm_reach, update.norm
