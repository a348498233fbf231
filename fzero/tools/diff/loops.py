"""Compare two training loops by what they tell a `Log`: they are run as they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.state.layout import as_real
from fzero.tools import rounding
from fzero.tools.diff import compare
from fzero.tools.trace.found import AsFound
from fzero.transforms import simulate


class LogEntry(NamedTuple):
    """What a loop has told once: of a parameter's path, or of "", its values."""

    kind: str
    values: dict[str, Tensor]


class Log:
    """What a training loop tells `fzero.diff`, in its order: copies, and nothing is changed.

    log.start(model)        the nn.Module, before an engine or an optimizer is made of it
    log.loss(loss)          of this rank
    log.gradients(model)    complete, before the update; of an engine: the engine
    log.parameters(model)   after the update; of an engine: the engine
    """

    def __init__(self, disturbance: float = 0.0) -> None:
        self.entries: list[LogEntry] = []
        self.order: dict[str, None] = {}  # of the gradients, as a backward has made them
        self._disturbance = disturbance

    def start(self, model: nn.Module) -> None:
        """Tell the parameters that the loop begins with.

        Call it once, first of all. One of the runs is made again from parameters that are changed
        by a few roundings, here and in place: so what rounding explains is measured.
        """
        if not isinstance(model, nn.Module):
            raise LayoutError(
                f"log.start got a {type(model).__name__}.",
                cause="an engine, whose parameters are sharded.",
                fix="give the nn.Module, before the engine is made of it.",
            )
        self._tell(compare.START, dict(model.named_parameters()))
        source = torch.Generator().manual_seed(0)
        for path, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._made(path))
            if self._disturbance and p.is_floating_point():
                with torch.no_grad():
                    signs = rounding.signs_like(p, source)
                    p.copy_(rounding.perturbed(p, self._disturbance, signs))

    def loss(self, loss: Tensor) -> None:
        """Tell the loss of a backward, on this rank; compared is the mean over ranks."""
        self._tell(compare.LOSS, {"": torch.as_tensor(loss)})

    def gradients(self, model: Any) -> None:
        """Tell all gradients: p.grad of a module, the full gradients of an engine (a collective).

        Where ranks have parts of a batch these are means over ranks, as an engine has them.
        """
        if hasattr(model, "full_gradients"):
            self._tell(compare.GRADIENT, model.full_gradients())
        else:
            found = {path: p.grad for path, p in model.named_parameters()}
            self._tell(compare.GRADIENT, {path: x for path, x in found.items() if x is not None})

    def parameters(self, model: Any) -> None:
        """Tell all parameters after an update: of an engine masters, if there are (a collective).

        It ends a step.
        """
        if hasattr(model, "full_parameters"):
            self._tell(compare.UPDATE, model.full_parameters())
        else:
            self._tell(compare.UPDATE, dict(model.named_parameters()))

    def _tell(self, kind: str, values: Mapping[str, Tensor]) -> None:
        if (kind == compare.START) != (not self.entries):
            raise LayoutError(
                f"the loop tells {kind!r} of number {len(self.entries) + 1}.",
                cause="log.start(model) is missing, or was called twice.",
                fix="call log.start(model) once, before all else.",
            )
        copies = {path: x.detach().cpu().clone() for path, x in values.items()}
        self.entries.append(LogEntry(kind, copies))

    def _made(self, path: str) -> Any:
        return lambda _: self.order.setdefault(path)


Loop = Callable[[Log], None]


def compare_loops(a: Any, b: Any, world_size: Any) -> compare.Difference | None:
    """Return the first difference of what two loops tell: in float64, and then as they are."""
    sizes = world_size if isinstance(world_size, tuple) else (1, world_size)
    if len(sizes) != 2 or not all(type(one) is int and one > 0 for one in sizes):
        raise LayoutError(
            f"diff: world_size={world_size!r}.",
            cause="a number of ranks that is none.",
            fix="give the ranks of run_b, or a pair, those of run_a and of run_b.",
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise LayoutError(
            f"diff of training loops, in a job of {dist.get_world_size()} processes.",
            cause="a comparison in the launched job.",
            fix="call it in one process with world_size=...: its ranks are virtual.",
        )
    found = None
    with AsFound("diff", a, b) as before:
        with suppress(Exception), before.record():  # what is wrong in every dtype is raised below
            found = _compared(a, b, sizes, rounding.WIDE)
        with before.record():
            return found or _compared(a, b, sizes, None)


class _Told(NamedTuple):
    """What the ranks of one run have told, and the spacing of the dtypes that they computed in."""

    ranks: Sequence[Log]
    coarsest: float

    @property
    def start(self) -> dict[str, Tensor]:
        """The parameters that rank 0 begins with."""
        return self.ranks[0].entries[0].values if self.ranks[0].entries else {}

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The floating dtypes that it starts with."""
        return {x.dtype for x in self.start.values() if x.is_floating_point()}


def _told(loop: Loop, world_size: int, wide: torch.dtype | None, disturbance: float = 0.0) -> _Told:
    """Run a loop on virtual ranks, from the caller's random state."""
    logs = [Log(disturbance) for _ in range(world_size)]
    modes = [rounding.Coarsest(of_parameters=True) for _ in range(world_size)]

    def of_rank(number: Tensor) -> Tensor:
        rank = int(number)
        with modes[rank], rounding.Widened() if wide else nullcontext():
            loop(logs[rank])
        return number

    with made_in(wide or torch.get_default_dtype()):
        simulate(of_rank, world_size=world_size)(torch.arange(world_size))
    return _Told(logs, max(mode.unit for mode in modes))


@contextmanager
def made_in(default: torch.dtype) -> Iterator[None]:
    """Context with this default dtype, in which the caller's random state is not changed."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(default)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _compared(
    a: Loop, b: Loop, world_size: tuple[int, int], wide: torch.dtype | None
) -> compare.Difference | None:
    mine = _told(a, world_size[0], wide)
    if wide is not None and mine.dtypes != {wide}:
        return None  # it makes its model of another dtype
    unit = max([mine.coarsest, rounding.SMALLEST_UNIT, *map(rounding.eps_of, mine.dtypes)])
    twin = _told(a, world_size[0], wide, rounding.DISTURBANCE * unit)
    if not mine.start:
        raise LayoutError(
            "diff: the loop of run_a tells nothing.",
            cause="a function that does not use its argument.",
            fix="call log.start(model), log.loss(loss), log.gradients(model) and "
            "log.parameters(model) in it.",
        )
    for path, x in mine.start.items():
        if not torch.equal(x, twin.start.get(path, x[:0])):
            raise LayoutError(
                f"diff: the loop of run_a begins with another {path} when it is called again.",
                cause="a model that is made outside of the loop and was trained, or a seed that "
                "the loop does not set.",
                fix="make the model, the optimizer and the engine in the loop: it is called "
                "several times.",
            )
    other = _told(b, world_size[1], wide)
    if wide is not None and other.dtypes != {wide}:
        return None
    shapes = [{path: x.shape for path, x in told.start.items()} for told in (mine, other)]
    if shapes[0] != shapes[1]:
        names = sorted({path for path, _ in shapes[0].items() ^ shapes[1].items()})
        raise LayoutError(
            f"diff: the loops start with other parameters: {', '.join(names[:4])}.",
            cause="two models, parameters that were renamed, or a loop without log.start(model).",
            fix="give both parameters of the same names and shapes, and call log.start in both.",
        )
    unit = max(unit, min(mine.coarsest, other.coarsest), *map(rounding.eps_of, other.dtypes))
    dtype = wide or max(mine.dtypes | other.dtypes, key=rounding.eps_of)
    return _first(mine, other, twin, unit, dtype)


def _first(
    a: _Told, b: _Told, twin: _Told, unit: float, dtype: torch.dtype
) -> compare.Difference | None:
    """Compare what is told at one place after the other; a loss begins a backward."""
    step, backward = 1, 0
    first, theirs = a.ranks[0].entries, b.ranks[0].entries
    for k in range(max(len(first), len(theirs))):
        kind, other = (some[k].kind if k < len(some) else None for some in (first, theirs))
        every = (*b.ranks, *twin.ranks)
        if kind is None or kind != other or any(len(log.entries) <= k for log in every):
            raise LayoutError(
                f"diff: what run_a tells at place {k + 1} is {kind or 'nothing'}, and run_b "
                f"{other or 'nothing'}.",
                cause="loops of other numbers of steps, or that tell in another order.",
                fix="tell the same, in the same order, in both loops and on all ranks.",
            )
        backward += kind == compare.LOSS
        found = _at(a, b, twin, k, unit)
        if found is not None:
            at = compare.Moment(step * (kind != compare.START), 1, backward or None)
            return found.placed(at, dtype)
        if kind == compare.UPDATE:
            step, backward = step + 1, 0
    return None


def _at(a: _Told, b: _Told, twin: _Told, k: int, unit: float) -> compare.Difference | None:
    """Compare what is told at one place: losses as means, and others on every rank."""
    told = [[log.entries[k].values for log in run.ranks] for run in (a, b, twin)]
    kind = a.ranks[0].entries[k].kind
    differ: dict[str, Any] = {}
    made = a.ranks[0].order if kind == compare.GRADIENT else {}
    order = [*dict.fromkeys([*made, *told[0][0], *told[1][0]])]
    for path in order:
        if kind == compare.LOSS:
            losses = ([values[path].double() for values in some] for some in told)
            x, y, z = (rounding.whole_leaf(torch.stack(some).mean(0)) for some in losses)
        else:
            x, y, z = (_spread(some, path, a.start[path]) for some in told)
        rounded = rounding.TERMS * unit * x.full.double().abs()
        bound = rounding.disturbed_bound(x.full, z.full) + rounded
        found = rounding.first_apart(x, y, 0.0 if kind == compare.START else bound)
        if found is not None:
            differ[path] = found._replace(ranks=()) if kind == compare.LOSS else found
    if not differ:
        return None
    path, found = next(iter(differ.items()))
    some = (order, differ) if kind == compare.GRADIENT else ()
    return compare.difference(kind, path, found).beside(compare.LoopDifference, *some)


def _spread(told: Sequence[Mapping[str, Tensor]], path: str, like: Tensor) -> rounding.Spread:
    """Return the copies of all ranks; zeros for a gradient that there is not."""
    nothing = torch.zeros_like(like)
    flats = (as_real(values.get(path, nothing)).reshape(-1) for values in told)
    copies = tuple(rounding.Copy(rank, 0, x) for rank, x in enumerate(flats))
    return rounding.Spread(tuple(as_real(like).shape), copies)
