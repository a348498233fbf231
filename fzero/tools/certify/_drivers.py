"""Run one cell on one rank, by a functional step or by an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.optim import from_torch
from fzero.state import NAMESPACE, TrainState
from fzero.state.logical import carried
from fzero.tools.certify._axes import Cell
from fzero.tools.certify._process import OptimizerOf
from fzero.tools.certify._reads import Reads
from fzero.tools.certify._seed import seed_of, seeded, unwrapped
from fzero.tools.certify._subject import CalledModule, Subject, tensors_of
from fzero.tools.certify._task import Task
from fzero.tools.compare import copied
from fzero.transforms import apply_gradients, full_params, global_norm, grad_and_reduce, shard
from fzero.transforms.functionalize import functionalize
from fzero.transforms.slots import slots

StepOf = Callable[..., Any]
"""(loss_fn, **options) -> step_fn(state, batches) -> (state, aux)."""

EngineOf = Callable[..., Any]
"""(module, optimizer, **options) -> what is called like an `Engine`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results of one update on one rank."""

    losses: list[Tensor]  # of its micro-batches, as they were computed
    norm: float | None  # as the driver reports it; None if it does not
    params: dict[str, Tensor]
    slots: dict[str, Any]  # what the optimizer keeps, of a run with logical ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """The description of a cell, the same on every rank."""

    subject: Subject
    task: Task
    cell: Cell
    reads: Reads
    step: StepOf | None  # None: fzero's own
    engine: EngineOf

    def weights(self, rank: int) -> list[Any]:
        """The weights of a rank's micro-batches in each update; None where they have none.

        Of a run with logical ranks those of each that the rank carries.
        """
        counts, places = range(self.task.micro_batches), self.places(rank)
        if not self.task.ragged:
            return [None for _ in counts]
        each = [[self.task.weight(place, n) for place in places] for n in counts]
        return [one if self.cell.logical is not None else one[0] for one in each]

    def places(self, rank: int) -> Sequence[int]:
        """Which batches a rank reads: its own, or those of the logical ranks that it carries."""
        logical = self.cell.logical
        if logical is None:
            return [self.reads.place(rank)]
        return carried(rank, self.cell.fact("worlds"), logical)

    def batches(self, rank: int, update: int) -> list[Any]:
        """The micro-batches of a rank, or its pieces of them.

        With logical ranks each is that of those which the rank carries, stacked.
        """
        every, count = self.each(rank, update), len(self.places(rank))
        if self.cell.logical is None:
            return every
        return [_stacked(every[i : i + count]) for i in range(0, len(every), count)]

    def each(self, rank: int, update: int) -> list[Any]:
        """The batches of a rank, one by one: of each micro-batch those of its logical ranks."""
        every = [self._of_place(place, rank, update) for place in self.places(rank)]
        return [batch for of_all in zip(*every, strict=True) for batch in of_all]

    def in_one(self, rank: int, update: int) -> Any:
        """All micro-batches of a rank, one logical rank after the other, stacked."""
        every, count = self.each(rank, update), len(self.places(rank))
        return _stacked([batch for place in range(count) for batch in every[place::count]])

    def _of_place(self, place: int, rank: int, update: int) -> list[Any]:
        counts = range(self.task.micro_batches)
        numbers = [self.task.batch_number(update, place, n) for n in counts]
        whole = [self.subject.batch(number, self.task.precision.dtype) for number in numbers]
        return [self.reads.piece(batch, rank) for batch in whole]


def run_on_rank(job: Job, optimizer: OptimizerOf, rank: int) -> list[Seen]:
    """Take every update of the job on this rank."""
    by = {"step": _by_step, "engine": _by_engine}[job.cell.at["drivers"]]
    return by(job, optimizer, rank)


# The functional driver.


def _by_step(job: Job, optimizer: OptimizerOf, rank: int) -> list[Seen]:
    model = job.subject.copy(job.task.precision.dtype)
    apply, params = _functional(model) if job.subject.is_module else (None, model)
    losses: list[tuple[int | None, Tensor]] = []
    stacks = job.cell.at["windows"] == "accumulate"  # which splits tensors along dim 0
    share = 1 if stacks else job.task.share
    first = stacks or job.cell.logical is not None

    def loss_fn(params: Any, batch: Any) -> Tensor:
        if first:
            batch = optree.tree_map(_first, batch, namespace=NAMESPACE)
        called = params
        if apply is not None:
            called = CalledModule(model, functools.partial(apply, params), params)
        with seeded(batch) as seed:
            loss = job.subject.loss(called, batch)
        losses.append((seed, unwrapped(loss)))
        return loss / share

    step = _made_step(job, loss_fn, job.weights(rank))
    rule = from_torch(optimizer, master_weights=job.task.precision.masters)
    state = step.init(params, rule)
    seen = []
    for update in range(job.task.updates):
        losses.clear()
        batches = [job.in_one(rank, update)] if stacks else job.batches(rank, update)
        state, aux = step(state, batches)
        norm = aux if job.step is None else None
        seen.append(
            Seen(
                losses=_told(losses, job.each(rank, update)),
                norm=None if norm is None else float(norm),
                params=copied(tensors_of(full_params(state))),
                slots=_slots(job, state),
            )
        )
    return seen


def _functional(model: Any) -> tuple[Callable[..., Any], Any]:
    """As `functionalize`; what the model makes of its buffers is dropped: no loss here reads it."""
    if not any(True for _ in model.buffers()):
        return functionalize(model)
    apply, params, buffers = functionalize(model, buffers=True)

    def applied(params: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(params, *args, buffers=buffers, **kwargs)[0]

    return applied, params


def _told(losses: Sequence[tuple[int | None, Tensor]], batches: Sequence[Any]) -> list[Tensor]:
    """Return the first loss of each of these batches; none where a step hides one of them.

    A step may compute other losses beside them, or those of single samples.
    """
    first = {seed: loss for seed, loss in reversed(losses) if seed is not None}
    found = [first[seed] for seed in map(seed_of, batches) if seed in first]
    return found if len(found) == len(batches) else []


def _made_step(job: Job, loss_fn: Callable[..., Tensor], weights: Sequence[float | None]) -> Any:
    """Return the user's step, or fzero's; one without `init` in the cell's transforms."""
    window = job.cell.at["windows"]
    if job.step is None:
        step = _plain_step(loss_fn, weights, tells_norm=window != "accumulate")
    else:
        options = {**job.cell.engine_options(), "coalesce": window == "coalesce"}
        step = job.step(loss_fn, **options)
        if hasattr(step, "init"):
            return step
    return shard(job.cell.around(step), **job.cell.shard_options())


def _plain_step(
    loss_fn: Callable[..., Tensor], weights: Sequence[float | None], *, tells_norm: bool
) -> Callable[..., Any]:
    def step_fn(state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        for batch, weight in zip(batches, weights, strict=False):  # one batch if they are stacked
            state, _ = grad_and_reduce(loss_fn, state, weight=weight)(batch)
        norm = global_norm(state) if tells_norm else None
        return apply_gradients(state), norm

    return step_fn


def _stacked(batches: Sequence[Any]) -> Any:
    """The micro-batches as one batch: tensors [N, *t]."""
    try:
        return optree.tree_map(
            lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
            *batches,
            namespace=NAMESPACE,
        )
    except (RuntimeError, ValueError) as error:
        raise LayoutError(
            f"certify: the batches cannot be stacked for fzero.accumulate ({error}).",
            cause="batches of several shapes.",
            fix='give batches of one shape, or windows=("each", "coalesce").',
        ) from error


def _first(leaf: Any) -> Any:
    return leaf[0] if isinstance(leaf, Tensor) else leaf


# The engine.


def _by_engine(job: Job, optimizer: OptimizerOf, rank: int) -> list[Seen]:
    module = job.subject.copy(job.task.precision.dtype)
    engine = job.engine(module, optimizer, **job.cell.engine_options())
    window, seen = job.cell.at["windows"], []
    for update in range(job.task.updates):
        batches, losses = job.batches(rank, update), []
        with engine.coalesce() if window == "coalesce" else nullcontext():
            for n, (batch, weight) in enumerate(zip(batches, job.weights(rank), strict=True)):
                for part, its_weight in _parts(job, engine, batch, weight):
                    with seeded(part):
                        loss = job.subject.loss(CalledModule(module, engine), part)
                    losses.append(loss.detach())
                    if window != "accumulate":
                        loss = loss / job.task.share
                    engine.backward(loss, **({} if its_weight is None else {"weight": its_weight}))
                if window == "accumulate" and n + 1 < len(batches):
                    engine.step()  # counts to gradient_accumulation_steps
        # Where gradients are clipped the update computes the norm: nothing is asked before it.
        clips = job.cell.max_norm is not None
        norm = None if clips else _norm_of(engine)
        engine.step()
        norm = _norm_of(engine) if clips else norm
        params = copied(engine.full_parameters())
        slots = _slots(job, getattr(engine, "state", None))
        seen.append(Seen(losses=losses, norm=norm, params=params, slots=slots))
    if hasattr(engine, "close"):
        engine.close()
    return seen


def _parts(job: Job, engine: Any, batch: Any, weight: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batch and its weight; of each logical rank, if the run has them."""
    if job.cell.logical is None:
        yield batch, weight
        return
    for number, part in enumerate(engine.parts(batch)):
        one = optree.tree_map(_first, part, namespace=NAMESPACE)
        yield one, None if weight is None else weight[number]


def _slots(job: Job, state: Any) -> dict[str, Any]:
    """Return what the optimizer keeps by path, of a run with logical ranks. A collective."""
    if job.cell.logical is None or not isinstance(state, TrainState):
        return {}
    tree: Any = slots(state, "optimizer")
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    paths = [" ".join(map(str, accessor.path)) for accessor in accessors]
    return copied(dict(zip(paths, leaves, strict=True)))


def _norm_of(engine: Any) -> float | None:
    norm = getattr(engine, "global_grad_norm", None)
    return None if norm is None else float(norm)
