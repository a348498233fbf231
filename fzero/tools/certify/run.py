"""`certify`: a model over the matrix of cells, on virtual ranks, each beside one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.adapter import Engine
from fzero.errors import LayoutError
from fzero.errors.check import is_count
from fzero.machine.codecs import bf16
from fzero.machine.compress import coarseness
from fzero.machine.packing import digest
from fzero.optim import from_torch
from fzero.options import takes
from fzero.ranks.virtual import run_ranks
from fzero.state import NAMESPACE, TrainState
from fzero.state.logical import carried
from fzero.tools.certify import matrix
from fzero.tools.certify.reference import (
    CopyGradient,
    ExpectedUpdate,
    Keep,
    OptimizerOf,
    Seen,
    Task,
    check,
    one_process,
    require_repeatable,
)
from fzero.tools.certify.subject import (
    CalledModule,
    Cut,
    Loss,
    Reads,
    Subject,
    require_cut,
    seed_of,
    seeded,
    subject_of,
    tensors_of,
    unwrapped,
)
from fzero.tools.trees import bits_of, copied, map_tensors
from fzero.transforms import apply_gradients, full_params, global_norm, grad_and_reduce, shard
from fzero.transforms.functionalize import functionalize
from fzero.transforms.map_params import slots
from fzero.transforms.state_entries import unequal

StepOf = Callable[..., Any]
"""(loss_fn, **options) -> step_fn(state, batches) -> (state, aux)."""

EngineOf = Callable[..., Any]
"""(module, optimizer, **options) -> what is called like an `Engine`."""

OnRanks = Callable[[Callable[[int], Any], int], list[Any]]
STRENGTH = 3  # every combination of the values of so many axes occurs
SGD = functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5)
_NO_BOUND = (
    "inside of a loss sums are made in another order than one process has, and for coarse numbers "
    "there is no bound of what this changes"
)
ON_NAMED: dict[str, tuple[tuple[str, ...], str]] = {
    "drivers": (("step",), "in the modules of an engine no axis is known by its name"),
    "precisions": (("fp64", "fp32"), _NO_BOUND),
    "wires": (("own", "predivided"), _NO_BOUND),
    "carriers": (("all",), "ranks that share a batch are no logical ranks"),
}
"""What meshes with names have, and why they have nothing else."""


@takes(
    "certify",
    "certify(model, loss, batches)",
    also=[axis.name for axis in matrix.AXES],
    of_module=True,
)
def certify(
    model: Any,
    loss: Loss,
    batches: Any,
    *,
    step: StepOf | None = None,
    engine: EngineOf | None = None,
    optimizer: OptimizerOf = SGD,
    updates: int = 2,
    full: bool = False,
    on_ranks: OnRanks = run_ranks,
    cut: Cut | None = None,
    on_cell: Callable[[matrix.CellResult], None] | None = None,
    **axes: Any,
) -> matrix.Report:
    """Run a model over stages, worlds, windows, precisions, ...: is each the one-process step?

    For every cell, W virtual ranks take `updates` updates, each rank of N batches of its own, by
    the functional step or by the engine. They must have what one process has that takes all W N
    batches, with torch.autograd and torch.optim alone: the losses, the gradient that the optimizer
    is given (the mean over ranks and micro-batches, or W times it where the cell sums; clipped
    where the cell clips), its norm before clipping, and the parameters. One that no rank uses has
    gradient zero in a functional step, and is not stepped by an engine. After an update all ranks
    have the same bits.

    What is compared bit for bit is read from the bits of the numbers: where each sum over ranks and
    micro-batches is exact in any order (see `exact` of a cell). Elsewhere the bound e of a gradient
    is what re-ordering these sums may change, 16 eps times the number of terms times their size (in
    16 bits 2 eps, or 4 where a loss is divided by other than a power of two; of a codec
    what its `bound` says of the largest gradient, which the next update makes up for if it has a
    memory). That of a parameter is, element by
    element, how far the one process's optimizer goes from g + e and g - e. eps is that of the
    coarsest dtype that a loss computes in.

    torch's random numbers are drawn from a seed that the values of each batch give: dropout masks
    are the same, whoever computes a batch.

    Args:
        model: a module, or a pytree of tensors (for functional steps alone). It is copied.
        loss: loss(model, batch) -> a scalar tensor. It calls `model` as it would the module, and
            may read `model.parameters()`; of a pytree it gets one of the parameters.
        batches: a list of batches, or a function of the number of a batch: pytrees of tensors. A
            cell takes updates x W x N of them. Floating ones are cast to the precision.
        step: makes the functional step of a cell, step(loss_fn, **options) -> step_fn. What it
            returns takes (state, batches) and gives (state, aux), and adds up the gradients of
            `loss_fn`, which has the division by N in it. The cell's transforms are put around it;
            one that has an `init` has its own, as `options` (`Engine`'s keywords, and `coalesce`)
            say. Default: a loop with `grad_and_reduce`.
        engine: makes the engine of a cell, engine(module, optimizer, **options), with the keywords
            of `Engine`. It is called with batches, and has `backward(loss)`, `step()`,
            `coalesce()`, `full_parameters()`, and `global_grad_norm` if it tells that. If `step`
            or `engine` is given and `drivers` is not, that driver alone is run. A factory that
            raises NotImplementedError has no such cell.
        optimizer: a torch.optim class or factory, called with a list of parameters. One that
            divides by |g| (Adam with a small eps) turns the rounding of what is nearly zero into
            updates, in which no fault can be told.
        updates: 2 at least show what is left from the update before.
        full: all cells; else every combination of three values of any axes occurs in some cell.
        on_ranks: on_ranks(body, W) -> [body(0), ..., body(W - 1)]; default virtual ranks.
        cut: with meshes of names, meshes={"data": 2, "seq": 2}: along which axes ranks share a
            batch, and how it is cut for them. {"seq": 1} is the dim of every tensor; in its place
            a dim or None for each argument, or fn(batch, index, size) -> the piece. Ranks along
            other axes read other batches. The reference is one process with whole batches, in
            which each axis has one rank; the loss of a batch is the mean over its ranks. Functional
            steps in fp64 and fp32 alone, and `worlds` is left out.
        on_cell: called with the result of each cell as it comes; cells that share what one process
            computes come together.
        **axes: the values to take, by name: drivers=, stages=, worlds=, micro_batches=,
            precisions=, clipping=, loss_scales=, windows=, buckets=, offload=, meshes=,
            reductions=, wires= (also codecs, of `fzero.codecs` or a user's own), rules=,
            ragged=, carriers=. All values where an axis is left out; of carriers "all". With
            carriers="fewer" the W ranks are logical ones: run on fewer ranks, on 1 and on a
            number that does not divide W, they must have the same bits.

    Returns:
        A `Report`: true if no cell failed, and printed as a table.

    Raises:
        CallError: for an unknown axis.
        LayoutError: for unknown values, too few batches, and a loss that is not finite,
            not one number, or another one when it is computed again. What a rank raises is an
            error of its cell.

    Example:
        >>> import torch, fzero
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss(model, x):
        ...     return model(x).square().mean()
        >>> batches = [torch.randn(4, 3) for _ in range(8)]
        >>> few = {"stages": (0, 3), "worlds": 2, "micro_batches": 2, "windows": "coalesce"}
        >>> report = fzero.certify(model, loss, batches, precisions="fp64", **few)
        >>> bool(report), report.failures
        (True, ())
    """
    meshes = [value.fact for value in matrix.restricted(axes)["meshes"]]
    names = dict.fromkeys(name for mesh in meshes if mesh for name, _ in mesh.axes)
    subject, cut = subject_of(model, loss, batches, tuple(names)), cut or {}
    require_cut(meshes, cut, axes)
    values = _values(subject, step, engine, axes)
    if not is_count(updates):
        raise LayoutError(
            f"certify: updates={updates!r}.",
            cause="a count that is no positive integer.",
            fix="give at least 1; 2 show what is left from the update before.",
        )
    for mesh in filter(None, meshes):
        for rank in range(math.prod(size for _, size in mesh.axes)):
            Reads(axes=mesh.axes, cut=cut).piece(subject.batches(0), rank)
    sizes = [len(of_axis) for of_axis in values.values()]
    chosen = matrix.covering(sizes, len(sizes) if full else STRENGTH)
    cells = [
        matrix.Cell(values={name: values[name][i] for name, i in zip(values, row, strict=True)})
        for row in chosen
    ]
    coverage = f"{len(cells)} cells, the whole product."
    if len(cells) < math.prod(sizes):
        coverage = (
            f"{len(cells)} of {math.prod(sizes)} cells, in which every combination of {STRENGTH} "
            "values occurs."
        )
    jobs = [
        Job(subject, _task(cell, cut, updates), cell, cut, step, engine or Engine) for cell in cells
    ]
    require_repeatable(subject, [job.task for job in jobs])
    # Those of one task are large, and few are kept: cells that share one are run together.
    wanted = functools.lru_cache(maxsize=3)(functools.partial(one_process, subject))
    shared = [(repr(job.task), job.cell.at["clipping"], job.cell.at["rules"]) for job in jobs]
    results: dict[int, matrix.CellResult] = {}
    for i in sorted(range(len(jobs)), key=shared.__getitem__):
        results[i] = _result(jobs[i], optimizer, wanted, on_ranks)
        if on_cell is not None:
            on_cell(results[i])
    return matrix.Report(
        name=subject.name, coverage=coverage, cells=tuple(results[i] for i in range(len(jobs)))
    )


def _values(
    subject: Subject, step: StepOf | None, engine: EngineOf | None, axes: Mapping[str, Any]
) -> dict[str, tuple[matrix.AxisValue, ...]]:
    """Return the values of each axis; of the drivers, those of the given factories."""
    given = [name for name, maker in (("step", step), ("engine", engine)) if maker is not None]
    able = ["step", "engine"] if subject.is_module and not subject.names else ["step"]
    usual: dict[str, Any] = {"drivers": given or able, "carriers": "all"}
    usual |= {"ragged": "off", "rules": "given"} if given else {}
    if subject.names:
        usual |= {name: ON_NAMED[name][0] for name in ("precisions", "wires", "carriers")}
    values = matrix.restricted({**usual, **axes})
    drivers = {value.name for value in values["drivers"]}
    if subject.names:
        values["worlds"] = (matrix.AxisValue("by mesh"),)
        for name, (known, why) in ON_NAMED.items():
            if others := [value.name for value in values[name] if value.name not in known]:
                raise LayoutError(
                    f"certify: {name}={others} on a mesh with names.",
                    cause=f"{why}.",
                    fix=f"choose from {', '.join(known)}.",
                )
    if not drivers <= {*able}:
        raise LayoutError(
            f"certify: an engine for a {type(subject.model).__name__}.",
            cause="parameters without a module.",
            fix='give an nn.Module, or drivers="step" without `engine`.',
        )
    if not drivers >= {*given}:
        raise LayoutError(
            f"certify: {given} given, and drivers={[*drivers]}.",
            cause="a step or an engine that no cell would use.",
            fix="leave one of them out, or name its driver too.",
        )
    if step is not None and any(value.name == "on" for value in values["ragged"]):
        raise LayoutError(
            'certify: ragged="on" with a step of yours.',
            cause="weights, which grad_and_reduce takes inside of the step.",
            fix="leave ragged out; `engine` may have it, if its backward takes `weight`.",
        )
    return values


def _task(cell: matrix.Cell, cut: Cut, updates: int) -> Task:
    """Return the task of a cell: counts, precision, and what encoding may lose."""
    precision, codec, axes = cell.fact("precisions"), cell.fact("wires"), _axes(cell)
    world = math.prod(size for name, size in axes if name not in cut)
    pieces = math.prod(size for name, size in axes if name in cut)
    is_cast = isinstance(codec, bf16)  # whose rounding is known as that of a dtype
    # twice where ranks keep more than their part of a sum
    times = 2 if cell.fact("stages") == 0 or cell.at["meshes"] == "replicas" else 1
    encodes = not is_cast and world * pieces > 1
    return Task(
        world=world,
        pieces=pieces,
        micro_batches=cell.fact("micro_batches"),
        updates=updates,
        precision=precision,
        low=torch.bfloat16 if is_cast else precision.low,
        loses=coarseness(codec) * times if encodes and codec is not None else 0.0,
        remembers=codec is not None and codec.memory is not False,
        sums=cell.at["reductions"] == "sum",
        ragged=cell.weighs,
        whole_loss=precision.autocast is None or cell.at["drivers"] == "step",
        steps_unused=cell.at["drivers"] == "step",
    )


def _axes(cell: matrix.Cell) -> tuple[tuple[str, int], ...]:
    """Return the axes of a cell's mesh."""
    mesh = cell.fact("meshes")
    return (("dp", cell.fact("worlds")),) if mesh is None else mesh.axes


# A cell.


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The description of a cell, the same on every rank."""

    subject: Subject
    task: Task
    cell: matrix.Cell
    cut: Cut
    step: StepOf | None  # None: fzero's own
    engine: EngineOf

    @property
    def reads(self) -> Reads:
        """What its ranks read."""
        return Reads(axes=_axes(self.cell), cut=self.cut)

    def places(self, rank: int) -> Sequence[int]:
        """Which batches a rank reads: its own, or those of the logical ranks that it carries."""
        logical = self.cell.logical
        if logical is None:
            return [self.reads.of(rank)[0]]
        return carried(rank, self.cell.fact("worlds"), logical)

    def rows(self, rank: int, update: int) -> list[list[Any]]:
        """The micro-batches of a rank, or its pieces: of each those of all its logical ranks."""
        task, made = self.task, list[list[Any]]()
        for n in range(task.micro_batches):
            numbers = [task.batch_number(update, place, n) for place in self.places(rank)]
            whole = [self.subject.batch(number, task.precision.dtype) for number in numbers]
            made.append([self.reads.piece(batch, rank) for batch in whole])
        return made

    def of_carried(self, row: list[Any], stack: Callable[[list[Any]], Any]) -> Any:
        """One of what a rank has for each of its logical ranks; all, if the run has such."""
        return row[0] if self.cell.logical is None else stack(row)

    def weights(self, rank: int) -> list[Any]:
        """The weights of a rank's micro-batches in each update; None where they have none."""
        places, counts = self.places(rank), range(self.task.micro_batches)
        if not self.task.ragged:
            return [None for _ in counts]
        return [self.of_carried([self.task.weight(p, n) for p in places], list) for n in counts]

    def seen(self, state: Any, norm: Any, losses: list[Tensor], params: Any) -> Seen:
        """Return what an update has given, with copies. Of logical ranks a collective."""
        kept: dict[str, Any] = {}
        if self.cell.logical is not None and isinstance(state, TrainState):
            tree: Any = slots(state, "optimizer")
            accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
            paths = [" ".join(map(str, accessor.path)) for accessor in accessors]
            kept = copied(dict(zip(paths, leaves, strict=True)))
        norm = None if norm is None else float(norm)
        return Seen(losses=losses, norm=norm, params=copied(params), slots=kept)


def _result(
    job: Job, given: OptimizerOf, wanted: Callable[..., list[ExpectedUpdate]], on_ranks: OnRanks
) -> matrix.CellResult:
    """Run one cell on its ranks, and compare with one process."""
    task, cell, first = job.task, job.cell, replace(job.task, updates=1)
    rule = cell.fact("rules") or given
    try:
        if cell.at["clipping"] == "on":  # at half the norm of the first update, so that it acts
            cell = replace(cell, max_norm=wanted(task, given, None)[0].norm / 2)
            if not cell.max_norm:
                raise LayoutError(
                    "certify: the gradient of the first update is zero.",
                    cause="parameters at a minimum, or that no loss uses: there is nothing to "
                    "compare.",
                    fix="give a model and batches with a gradient.",
                )
        expected = wanted(task, rule, cell.max_norm)
        gradients = wanted(first, CopyGradient, cell.max_norm)
    except LayoutError:
        raise
    except Exception as error:  # one process cannot do it: an op in 16 bits, an optimizer
        why = f"in one process, {type(error).__name__}: {_first_line(error)}"
        return matrix.CellResult(at=cell.at, unsupported=why)
    ranks = task.world * task.pieces
    job = replace(job, cell=replace(cell, logical=task.world if cell.carries else None))

    def run(optimizer: OptimizerOf, *, updates: int = task.updates) -> list[list[Seen]]:
        its = replace(job, task=replace(task, updates=updates))
        return on_ranks(functools.partial(_by(job), its, optimizer), ranks)

    try:
        shown, trained = run(CopyGradient, updates=1), run(rule)
        fewer = _on_fewer(job, rule, trained, on_ranks) if cell.carries else ""
        of_gradient = check("gradient", gradients, shown)
        if of_gradient.difference is not None:
            # It is told, if without an update nothing changes parameters, and with one they do.
            before = tensors_of(job.subject.copy(task.precision.dtype))
            if _are(shown, before) or not _are(run(Keep, updates=1), before):
                of_gradient = matrix.Check(what="gradient")
        checks = (
            check("loss", expected, trained, [job.reads.of(rank)[0] for rank in range(ranks)]),
            of_gradient,
            check("norm", expected, trained),
            check("update", expected, trained),
        )
    except NotImplementedError as error:
        return matrix.CellResult(at=cell.at, unsupported=_first_line(error) or "not supported")
    except Exception as error:  # whatever a user's step or engine raises is its cell's
        return matrix.CellResult(at=cell.at, error=_said(error))
    for seen in zip(*trained, strict=True):  # of one update: all ranks have the same bits
        told = [[(f"parameter {p}", digest(x)) for p, x in one.params.items()] for one in seen]
        if (error := unequal(told)) is not None:
            fewer = _said(error)
            break
    return matrix.CellResult(at=cell.at, checks=checks, error=fewer)


def _are(ranks: Sequence[Sequence[Seen]], before: Mapping[str, Tensor]) -> bool:
    """Whether the parameters of each rank after the first update are these."""
    pairs = [(one[0].params.get(path), x) for one in ranks for path, x in before.items()]
    return all(x is not None and torch.equal(x.to(y.dtype), y) for x, y in pairs)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _said(error: Exception) -> str:
    notes = getattr(error, "__notes__", ())
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


# Its logical ranks on fewer ranks: the bits that they must have on as many.


def _on_fewer(
    job: Job, rule: OptimizerOf, trained: Sequence[Sequence[Seen]], on_ranks: OnRanks
) -> str:
    """Run the logical ranks of a cell on fewer ranks; return what has other bits there.

    On 1 rank, and on the largest number that does not divide them.
    """
    logical = job.task.world
    odd = [ranks for ranks in range(2, logical) if logical % ranks]
    for ranks in (1, *odd[-1:]):
        values = {**job.cell.values, "worlds": matrix.number_value(ranks)}
        there = replace(job, cell=replace(job.cell, values=values))
        said = f"{logical} logical ranks on {ranks} rank{'s' * (ranks > 1)}"
        try:
            found = on_ranks(functools.partial(_by(job), there, rule), ranks)
        except Exception as error:
            error.add_note(f"({said})")
            raise
        for update in range(job.task.updates):
            off: dict[str, list[int]] = {}
            for rank, here in enumerate(found):
                alone = [trained[i][update] for i in carried(rank, ranks, logical)]
                for name in _other_bits(alone, here[update]):
                    off.setdefault(name, []).append(rank)
            for name, those in off.items():
                which = f"rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}"
                where = f"update {update + 1}, {which}: {name} has other bits"
                return f"{said}, and not on {logical}: {where}"
    return ""


def _other_bits(alone: Sequence[Seen], here: Seen) -> list[str]:
    """Return what has other bits on a rank than its logical ranks have by themselves."""
    mine, first = (
        {
            **{f"parameter {path}": x for path, x in one.params.items()},
            **{f"the optimizer's {path}": x for path, x in one.slots.items()},
            "the norm": one.norm,
        }
        for one in (here, alone[0])
    )
    mine["the loss"] = [x for i in range(len(alone)) for x in here.losses[i :: len(alone)]]
    first["the loss"] = [x for one in alone for x in one.losses]
    return [name for name, x in first.items() if bits_of(x) != bits_of(mine.get(name))]


# A rank, by a functional step or by an engine.


def _by(job: Job) -> Callable[[Job, OptimizerOf, int], list[Seen]]:
    """Return what takes every update of a job on one rank."""
    return _by_step if job.cell.at["drivers"] == "step" else _by_engine


def _by_step(job: Job, optimizer: OptimizerOf, rank: int) -> list[Seen]:
    model = job.subject.copy(job.task.precision.dtype)
    apply: Any = None
    params, more = model, dict[str, Any]()
    if job.subject.is_module:
        # What the model makes of its buffers is dropped: no loss here reads it.
        has_buffers = any(True for _ in model.buffers())
        apply, params, *buffers = functionalize(model, buffers=has_buffers)
        more = {"buffers": buffers[0]} if buffers else {}
    window, weights = job.cell.at["windows"], job.weights(rank)
    stacks = window == "accumulate"  # which splits tensors along dim 0
    share = 1 if stacks else job.task.share
    losses: list[tuple[int | None, Tensor]] = []

    def loss_fn(params: Any, batch: Any) -> Tensor:
        if stacks or job.cell.logical is not None:
            batch = _first(batch)
        called = params
        if apply is not None:

            def call(*args: Any, **kwargs: Any) -> Any:
                out = apply(params, *args, **more, **kwargs)
                return out[0] if more else out

            called = CalledModule(model, call, params)
        with seeded(batch) as seed:
            loss = job.subject.loss(called, batch)
        losses.append((seed, unwrapped(loss)))
        return loss / share

    def plain(state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        for batch, weight in zip(batches, weights, strict=False):  # one batch if they are stacked
            state, _ = grad_and_reduce(loss_fn, state, weight=weight)(batch)
        norm = None if stacks else global_norm(state)
        return apply_gradients(state), norm

    step: Any = plain
    if job.step is not None:
        step = job.step(loss_fn, **job.cell.options())
    if not hasattr(step, "init"):  # one that has it has its own transforms
        step = job.cell.sharded(step, shard)
    rule = from_torch(optimizer, master_weights=job.task.precision.masters)
    state, seen = step.init(params, rule), []
    for update in range(job.task.updates):
        losses.clear()
        rows = job.rows(rank, update)
        batches = [job.of_carried(row, _stacked) for row in rows]
        if stacks:  # all in one, those of one logical rank after those of another
            batches = [_stacked([batch for column in zip(*rows, strict=True) for batch in column])]
        state, aux = step(state, batches)
        # A step may compute other losses beside them, or those of single samples: told is the
        # first loss of each batch, or none where a step hides one of them.
        first: dict[int | None, Tensor] = dict(reversed(losses))
        seeds = [seed_of(batch) for row in rows for batch in row]
        told = (
            [first[seed] for seed in seeds if seed is not None] if first.keys() >= {*seeds} else []
        )
        norm, params = aux if job.step is None else None, tensors_of(full_params(state))
        seen.append(job.seen(state, norm, told, params))
    return seen


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


def _first(batch: Any) -> Any:
    """The first of batches that are stacked."""
    return map_tensors(lambda x: x[0], batch)


def _by_engine(job: Job, optimizer: OptimizerOf, rank: int) -> list[Seen]:
    module = job.subject.copy(job.task.precision.dtype)
    options, window, seen = job.cell.options(), job.cell.at["windows"], list[Seen]()
    coalesces = options.pop("coalesce")
    engine = job.engine(module, optimizer, **options)
    for update in range(job.task.updates):
        batches = [job.of_carried(row, _stacked) for row in job.rows(rank, update)]
        losses: list[Tensor] = []
        with engine.coalesce() if coalesces else nullcontext():
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
        norm = None if clips else getattr(engine, "global_grad_norm", None)
        norm = None if norm is None else float(norm)
        engine.step()
        norm = getattr(engine, "global_grad_norm", None) if clips else norm
        params = engine.full_parameters()
        seen.append(job.seen(getattr(engine, "state", None), norm, losses, params))
    if hasattr(engine, "close"):
        engine.close()
    return seen


def _parts(job: Job, engine: Any, batch: Any, weight: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batch and its weight; of each logical rank, if the run has them."""
    if job.cell.logical is None:
        yield batch, weight
        return
    for number, part in enumerate(engine.parts(batch)):
        yield _first(part), None if weight is None else weight[number]
