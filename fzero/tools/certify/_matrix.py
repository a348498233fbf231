"""`certify`: a model over the matrix of cells, each beside the step of one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from fzero.adapter import Engine
from fzero.errors import LayoutError
from fzero.errors.check import is_count
from fzero.machine.packing import digest
from fzero.optim import from_torch
from fzero.options import takes
from fzero.ranks.mesh import Mesh
from fzero.ranks.virtual import run_ranks
from fzero.tools.certify._axes import AXES, AxisValue, Cell, restricted
from fzero.tools.certify._carriers import bits_apart, fewer_than
from fzero.tools.certify._compare import Check, check
from fzero.tools.certify._cover import covering
from fzero.tools.certify._drivers import EngineOf, Job, Seen, StepOf, run_on_rank
from fzero.tools.certify._process import OptimizerOf, Process, require_repeatable
from fzero.tools.certify._reads import Cut, Reads, require_cut
from fzero.tools.certify._reference import CopyGradient, ExpectedUpdate, Keep, one_process
from fzero.tools.certify._report import CellResult, Report
from fzero.tools.certify._subject import Loss, Subject, subject_of, tensors_of
from fzero.tools.certify._task import Task, Wire
from fzero.transforms.replicas import unequal

STRENGTH = 3  # every combination of the values of so many axes occurs
OnRanks = Callable[[Callable[[int], Any], int], list[Any]]
SGD = functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5)
ON_NAMED: dict[str, tuple[str, ...]] = {
    "precisions": ("fp64", "fp32"),
    "wires": ("own", "predivided"),
    "carriers": ("all",),
}
_NO_BOUND = (
    "inside of a loss sums are made in another order than one process has, and for coarse numbers "
    "there is no bound of what this changes"
)
ADAMW = functools.partial(torch.optim.AdamW, lr=2.0**-6, eps=2.0**-6)


@takes(
    "certify", "certify(model, loss, batches)", also=[axis.name for axis in AXES], of_module=True
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
    on_cell: Callable[[CellResult], None] | None = None,
    **axes: Any,
) -> Report:
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
    given = restricted(axes)
    meshes = [value.fact for value in _of(given, "meshes")]
    names = dict.fromkeys(name for mesh in meshes if mesh for name, _ in mesh.axes)
    subject = subject_of(model, loss, batches, tuple(names))
    require_cut(meshes, cut or {}, axes)
    values = _values(subject, step, engine, axes)
    sizes = [len(of_axis) for of_axis in values]
    rows = covering(sizes, len(sizes) if full else STRENGTH)
    cells = [Cell(values=tuple(x[i] for x, i in zip(values, row, strict=True))) for row in rows]
    _require_updates(updates)
    matrix = _Matrix(subject, step, engine or Engine, optimizer, updates, on_ranks, cut or {})
    for mesh in meshes:
        _require_pieces(subject, mesh, cut or {})
    matrix.require_repeatable(cells)
    product = math.prod(sizes)
    coverage = f"{len(cells)} cells, the whole product."
    if len(cells) < product:
        coverage = (
            f"{len(cells)} of {product} cells, in which every combination of {STRENGTH} values "
            "occurs."
        )
    results: dict[int, CellResult] = {}
    for i in sorted(range(len(cells)), key=lambda i: matrix.needs(cells[i])):
        results[i] = matrix.result(cells[i])
        if on_cell is not None:
            on_cell(results[i])
    ordered = tuple(results[i] for i in range(len(cells)))
    return Report(name=subject.name, coverage=coverage, cells=ordered)


def _values(
    subject: Subject, step: StepOf | None, engine: EngineOf | None, axes: dict[str, Any]
) -> list[tuple[AxisValue, ...]]:
    """Return the values of each axis; of the drivers, those of the given factories."""
    given = [name for name, maker in (("step", step), ("engine", engine)) if maker is not None]
    able = ["step", "engine"] if subject.is_module and not subject.names else ["step"]
    usual = {"carriers": "all"}
    usual |= {"ragged": "off", "rules": "given"} if given else {}
    on_named = ON_NAMED if subject.names else {}
    values = restricted({"drivers": given or able, **usual, **on_named, **axes})
    drivers = [value.name for value in values[0]]
    if subject.names:
        _require_on_named(values)
        values = [
            (AxisValue("by mesh"),) if axis.name == "worlds" else of_axis
            for axis, of_axis in zip(AXES, values, strict=True)
        ]
    if not set(drivers) <= set(able):
        raise LayoutError(
            f"certify: an engine for a {type(subject.model).__name__}.",
            cause="parameters without a module.",
            fix='give an nn.Module, or drivers="step" without `engine`.',
        )
    if not set(given) <= set(drivers):
        raise LayoutError(
            f"certify: {given} given, and drivers={drivers}.",
            cause="a step or an engine that no cell would use.",
            fix="leave one of them out, or name its driver too.",
        )
    if step is not None and any(value.name == "on" for value in values[-1]):
        raise LayoutError(
            'certify: ragged="on" with a step of yours.',
            cause="weights, which grad_and_reduce takes inside of the step.",
            fix="leave ragged out; `engine` may have it, if its backward takes `weight`.",
        )
    return values


def _require_on_named(values: list[tuple[AxisValue, ...]]) -> None:
    """Raise `LayoutError` for values that meshes with names do not have."""
    for name, (able, why) in {
        "drivers": (("step",), "in the modules of an engine no axis is known by its name"),
        "precisions": (ON_NAMED["precisions"], _NO_BOUND),
        "wires": (ON_NAMED["wires"], _NO_BOUND),
        "carriers": (ON_NAMED["carriers"], "ranks that share a batch are no logical ranks"),
    }.items():
        if others := [value.name for value in _of(values, name) if value.name not in able]:
            raise LayoutError(
                f"certify: {name}={others} on a mesh with names.",
                cause=f"{why}.",
                fix=f"choose from {', '.join(able)}.",
            )


def _of(values: list[tuple[AxisValue, ...]], name: str) -> tuple[AxisValue, ...]:
    """Return the values on one axis."""
    return next(found for axis, found in zip(AXES, values, strict=True) if axis.name == name)


def _require_pieces(subject: Subject, mesh: Mesh | None, cut: Cut) -> None:
    """Raise `LayoutError` if a batch cannot be cut for the ranks of a mesh."""
    if mesh is None:
        return
    reads = Reads(axes=mesh.axes, cut=cut)
    for rank in range(reads.places * reads.pieces):
        reads.piece(subject.batches(0), rank)


class _Matrix:
    """One subject and the arguments of `certify`; one-process references are cached."""

    def __init__(
        self,
        subject: Subject,
        step: StepOf | None,
        engine: EngineOf,
        optimizer: OptimizerOf,
        updates: int,
        on_ranks: OnRanks,
        cut: Cut,
    ) -> None:
        self.subject, self.step, self.engine = subject, step, engine
        self.optimizer, self.updates, self.on_ranks = optimizer, updates, on_ranks
        self.cut = cut
        self.wanted = functools.lru_cache(maxsize=3)(self._wanted)  # of one task: they are large
        self.max_norm = functools.cache(self._max_norm)

    def needs(self, cell: Cell) -> tuple[str, ...]:
        """Return what the reference of a cell depends on: cells that share one are run together."""
        return repr(self.task(cell)), cell.at["clipping"], cell.at["rules"]

    def require_repeatable(self, cells: Sequence[Cell]) -> None:
        """Raise `LayoutError` if a loss differs when it is computed twice.

        In the first precision that it can be computed in: in others its cells say that it cannot.
        """
        tasks = {task.precision: task for task in map(self.task, reversed(cells))}
        for left, task in reversed([*enumerate(tasks.values())]):
            try:
                return require_repeatable(Process(self.subject, task.precision, task.whole_loss))
            except (RuntimeError, NotImplementedError):
                if not left:
                    raise

    def reads(self, cell: Cell) -> Reads:
        """Return what the ranks of a cell read."""
        mesh = cell.fact("meshes")
        axes = (("dp", cell.fact("worlds")),) if mesh is None else mesh.axes
        return Reads(axes=axes, cut=self.cut)

    def task(self, cell: Cell) -> Task:
        """Return the task of a cell: counts and precision."""
        precision, reads = cell.fact("precisions"), self.reads(cell)
        return Task(
            world=reads.places,
            pieces=reads.pieces,
            micro_batches=cell.fact("micro_batches"),
            updates=self.updates,
            precision=precision,
            wire=_wire(cell),
            sums=cell.at["reductions"] == "sum",
            whole_loss=precision.autocast is None or cell.at["drivers"] == "step",
            ragged=cell.weighs,
            steps_unused=cell.at["drivers"] == "step",
        )

    def rule(self, cell: Cell) -> OptimizerOf:
        """Return the optimizer of a cell: the one that was given, or one of whole matrices."""
        return cell.fact("rules") or self.optimizer

    def result(self, cell: Cell) -> CellResult:
        """Run one cell on its ranks, and compare with one process."""
        task = self.task(cell)
        try:
            if cell.at["clipping"] == "on":
                cell = replace(cell, max_norm=self.max_norm(task))
            wanted = self.wanted(task, self.rule(cell), cell.max_norm)
            gradients = self.wanted(replace(task, updates=1), CopyGradient, cell.max_norm)
        except LayoutError:
            raise
        except Exception as error:  # one process cannot do it: an op in 16 bits, an optimizer
            why = f"in one process, {type(error).__name__}: {_first_line(error)}"
            return CellResult(at=cell.at, unsupported=why)
        reads = self.reads(cell)
        if cell.carries:
            cell = replace(cell, logical=task.world)
        job = Job(
            subject=self.subject,
            task=task,
            cell=cell,
            reads=reads,
            step=self.step,
            engine=self.engine,
        )
        try:
            shown = self._seen(_first_update(job), CopyGradient)
            trained = self._seen(job, self.rule(cell))
            fewer = self._carried(job, trained) if cell.carries else ""
            checks = (
                check("loss", wanted, trained, [reads.place(rank) for rank in range(task.ranks)]),
                self._gradient(job, gradients, shown),
                check("norm", wanted, trained),
                check("update", wanted, trained),
            )
        except NotImplementedError as error:
            return CellResult(at=cell.at, unsupported=_first_line(error) or "not supported")
        except Exception as error:  # whatever a user's step or engine raises is its cell's
            return CellResult(at=cell.at, error=_said(error))
        return CellResult(at=cell.at, checks=checks, error=_parted(trained) or fewer)

    def _gradient(
        self, job: Job, wanted: Sequence[ExpectedUpdate], shown: Sequence[Sequence[Seen]]
    ) -> Check:
        """Compare the gradient, if it is told: nothing changes parameters after the update."""
        found = check("gradient", wanted, shown)
        if found.difference is None:
            return found
        before = tensors_of(self.subject.copy(job.task.precision.dtype))
        if _are(shown, before) or not _are(self._seen(_first_update(job), Keep), before):
            return Check(what="gradient", compared=False, bound=0.0, difference=None)
        return found

    def _seen(self, job: Job, optimizer: OptimizerOf, ranks: int | None = None) -> list[list[Seen]]:
        run = functools.partial(run_on_rank, job, optimizer)
        return self.on_ranks(run, ranks or job.task.ranks)

    def _carried(self, job: Job, trained: list[list[Seen]]) -> str:
        """Run the logical ranks of a cell on fewer ranks; return what has other bits there."""
        logical = job.task.world
        for ranks in fewer_than(logical):
            there = replace(job, cell=job.cell.carried_by(ranks))
            said = f"{logical} logical ranks on {ranks} rank{'s' * (ranks > 1)}"
            try:
                found = self._seen(there, self.rule(job.cell), ranks)
            except Exception as error:
                error.add_note(f"({said})")
                raise
            if apart := bits_apart(trained, found, logical):
                return f"{said}, and not on {logical}: {apart}"
        return ""

    def _wanted(
        self, task: Task, optimizer: OptimizerOf, max_norm: float | None
    ) -> list[ExpectedUpdate]:
        mixes = _mixes(optimizer, self.subject.copy(task.precision.dtype))
        return one_process(self.subject, task, optimizer, max_norm=max_norm, mixes=mixes)

    def _max_norm(self, task: Task) -> float:
        """Return half the norm of the first update, so that clipping acts."""
        norm = self.wanted(task, self.optimizer, None)[0].norm
        if norm:
            return norm / 2
        raise LayoutError(
            "certify: the gradient of the first update is zero.",
            cause="parameters at a minimum, or that no loss uses: there is nothing to compare.",
            fix="give a model and batches with a gradient.",
        )


def _wire(cell: Cell) -> Wire | None:
    """Return how gradients are encoded: twice where ranks keep more than their part of a sum."""
    codec = cell.fact("wires")
    twice = cell.fact("stages") == 0 or cell.at["meshes"] == "replicas"
    return None if codec is None else Wire(codec, 2 if twice else 1)


def _mixes(optimizer: OptimizerOf, model: Any) -> bool:
    """Whether a rule looks at a parameter as a whole, as far as fzero finds that by its trial."""
    with suppress(LayoutError):  # one that fzero does not take, for an engine that does
        return not from_torch(optimizer).bind(tensors_of(model)).elementwise
    return False


def _first_update(job: Job) -> Job:
    """Return the job with one update alone, to compare the gradient itself."""
    return replace(job, task=replace(job.task, updates=1))


def _are(ranks: Sequence[Sequence[Seen]], before: Mapping[str, torch.Tensor]) -> bool:
    """Whether the parameters of each rank after the first update are these."""
    pairs = [(one[0].params.get(path), x) for one in ranks for path, x in before.items()]
    return all(x is not None and torch.equal(x.to(y.dtype), y) for x, y in pairs)


def _parted(ranks: Sequence[Sequence[Seen]]) -> str:
    """Return a message if ranks have other bits of a parameter after an update; else ""."""
    for seen in zip(*ranks, strict=True):  # of one update
        told = [[(f"parameter {p}", digest(x)) for p, x in one.params.items()] for one in seen]
        if (error := unequal(told)) is not None:
            return _said(error)
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _said(error: Exception) -> str:
    notes = getattr(error, "__notes__", ())
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


def _require_updates(updates: Any) -> None:
    if not is_count(updates):
        raise LayoutError(
            f"certify: updates={updates!r}.",
            cause="a count that is no positive integer.",
            fix="give at least 1; 2 show what is left from the update before.",
        )
