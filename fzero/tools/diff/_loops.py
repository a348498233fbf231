"""Compare two training loops by what they tell a `Log`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.errors import LayoutError
from fzero.state.layout import as_real
from fzero.tools.compare import (
    DISTURBANCE,
    SMALLEST_UNIT,
    TERMS,
    WIDE,
    Coarsest,
    Copy,
    Spread,
    Widened,
    disturbed_bound,
    eps_of,
    first_apart,
    whole_leaf,
)
from fzero.tools.diff._difference import (
    GRADIENT,
    LOSS,
    START,
    Difference,
    Moment,
    difference_of,
)
from fzero.tools.diff._log import Log, LogEntry, moments
from fzero.tools.diff._run import made_in
from fzero.tools.diff._side import Apart, Beside
from fzero.tools.trace.found import AsFound
from fzero.transforms import simulate
from fzero.transforms.pipeline import Step

Loop = Callable[[Log], None]


def is_loop(run: Any) -> TypeGuard[Loop]:
    """Whether a run is a function that tells a `Log`."""
    return callable(run) and not isinstance(run, Step)


def sizes_of(world_size: Any) -> tuple[int, int]:
    """Return the numbers of ranks of both runs. Raises `LayoutError` for what is none."""
    sizes = world_size if isinstance(world_size, tuple) else (1, world_size)
    if len(sizes) == 2 and all(type(one) is int and one > 0 for one in sizes):
        return sizes
    raise LayoutError(
        f"diff: world_size={world_size!r}.",
        cause="a number of ranks that is none.",
        fix="give the ranks of run_b, or a pair, those of run_a and of run_b.",
    )


def compare_loops(a: Loop, b: Loop, world_size: tuple[int, int]) -> Difference | None:
    """Return the first difference of what two loops tell: in float64, and then as they are."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise LayoutError(
            f"diff of training loops, in a job of {dist.get_world_size()} processes.",
            cause="a comparison in the launched job.",
            fix="call it in one process with world_size=...: its ranks are virtual.",
        )
    found = None
    with AsFound("diff", a, b) as before:
        with suppress(Exception), before.record():  # what is wrong in every dtype is raised below
            found = _compared(a, b, world_size, WIDE)
        with before.record():
            return found or _compared(a, b, world_size, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Told:
    """What the ranks of one run have told, and the spacing of the dtypes that they computed in."""

    ranks: Sequence[Log]
    coarsest: float

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The floating dtypes that it starts with."""
        return {x.dtype for x in self.start.values() if x.is_floating_point()}

    @property
    def start(self) -> dict[str, Tensor]:
        """The parameters that rank 0 begins with."""
        return self.ranks[0].entries[0].values if self.ranks[0].entries else {}


def _compared(
    a: Loop, b: Loop, world_size: tuple[int, int], wide: torch.dtype | None
) -> Difference | None:
    mine = _told(a, world_size[0], wide)
    if wide is not None and mine.dtypes != {wide}:
        return None  # it makes its model of another dtype
    unit = max([mine.coarsest, SMALLEST_UNIT, *map(eps_of, mine.dtypes)])
    twin = _told(a, world_size[0], wide, DISTURBANCE * unit)
    _require_same_start(mine, twin)
    other = _told(b, world_size[1], wide)
    if wide is not None and other.dtypes != {wide}:
        return None
    names = {path for path in (*mine.start, *other.start) if not _alike(mine, other, path)}
    if names or mine.start.keys() != other.start.keys():
        raise LayoutError(
            f"diff: the loops start with other parameters: {', '.join(sorted(names)[:4])}.",
            cause="two models, parameters that were renamed, or a loop without log.start(model).",
            fix="give both parameters of the same names and shapes, and call log.start in both.",
        )
    unit = max(unit, min(mine.coarsest, other.coarsest), *map(eps_of, other.dtypes))
    found = next(_differences(mine, other, twin, unit), None)
    if found is None:
        return None
    dtype = wide or max(mine.dtypes | other.dtypes, key=eps_of)
    return difference_of(*found, dtype, of_loop=True)


def _alike(a: _Told, b: _Told, path: str) -> bool:
    return path in a.start and path in b.start and a.start[path].shape == b.start[path].shape


def _told(loop: Loop, world_size: int, wide: torch.dtype | None, disturbance: float = 0.0) -> _Told:
    """Run a loop on virtual ranks, from the caller's random state."""
    logs = [Log(disturbance) for _ in range(world_size)]
    modes = [Coarsest(of_parameters=True) for _ in range(world_size)]

    def of_rank(number: Tensor) -> Tensor:
        rank = int(number)
        with modes[rank], Widened() if wide else nullcontext():
            loop(logs[rank])
        return number

    with made_in(wide or torch.get_default_dtype()):
        simulate(of_rank, world_size=world_size)(torch.arange(world_size))
    return _Told(ranks=logs, coarsest=max(mode.unit for mode in modes))


def _require_same_start(a: _Told, again: _Told) -> None:
    if not a.start:
        raise LayoutError(
            "diff: the loop of run_a tells nothing.",
            cause="a function that does not use its argument.",
            fix="call log.start(model), log.loss(loss), log.gradients(model) and "
            "log.parameters(model) in it.",
        )
    other = [p for p, x in a.start.items() if not torch.equal(x, again.start.get(p, x[:0]))]
    if other:
        raise LayoutError(
            f"diff: the loop of run_a begins with another {other[0]} when it is called again.",
            cause="a model that is made outside of the loop and was trained, or a seed that the "
            "loop does not set.",
            fix="make the model, the optimizer and the engine in the loop: it is called several "
            "times.",
        )


def _differences(a: _Told, b: _Told, twin: _Told, unit: float) -> Iterator[tuple[Moment, Apart]]:
    rows = [list(moments(log.entries)) for log in (a.ranks[0], b.ranks[0])]
    for k in range(max(map(len, rows))):
        told = [some[k] if k < len(some) else None for some in rows]
        kinds = [one and one[0].kind for one in told]
        if kinds[0] != kinds[1] or any(len(log.entries) <= k for log in (*b.ranks, *twin.ranks)):
            raise LayoutError(
                f"diff: what run_a tells at place {k + 1} is {kinds[0] or 'nothing'}, and run_b "
                f"{kinds[1] or 'nothing'}.",
                cause="loops of other numbers of steps, or that tell in another order.",
                fix="tell the same, in the same order, in both loops and on all ranks.",
            )
        _, step, backward = told[0] or told[1] or (None, 0, 0)
        for apart in _at(a, b, twin, k, 0.0 if kinds[0] == START else unit):
            yield Moment(step if kinds[0] != START else 0, 1, backward or None), apart


def _at(a: _Told, b: _Told, twin: _Told, k: int, unit: float) -> Iterator[Apart]:
    """Compare what is told at one place: losses as means, and others on every rank."""
    mine, other, third = ([log.entries[k] for log in told.ranks] for told in (a, b, twin))
    kind = mine[0].kind
    if kind == LOSS:
        x, y, z = (whole_leaf(_mean(some)) for some in (mine, other, third))
        found = first_apart(x, y, _bound(x, z, unit))
        if found is not None:
            yield Apart(kind, "", found._replace(index=(), ranks=()))
        return
    order = dict.fromkeys([*a.ranks[0].order, *mine[0].values, *other[0].values])
    apart = []
    for path in order if kind == GRADIENT else dict.fromkeys([*mine[0].values, *other[0].values]):
        x, y, z = (_spread(some, path, a.start[path]) for some in (mine, other, third))
        bound = 0.0 if kind == START else _bound(x, z, unit)
        found = first_apart(x, y, bound)
        if found is not None:
            apart.append(Apart(kind, path, found))
    if kind == GRADIENT and apart:
        differ = tuple(one.path for one in apart)
        agree = tuple(path for path in order if path not in differ)
        apart = [apart[0]._replace(beside=Beside(agree, differ))]
    yield from apart


def _bound(x: Spread, twin: Spread, unit: float) -> Tensor:
    return disturbed_bound(x.full, twin.full) + TERMS * unit * x.full.double().abs()


def _mean(told: Sequence[LogEntry]) -> Tensor:
    return torch.stack([one.values[""].double() for one in told]).mean(0)


def _spread(told: Sequence[LogEntry], path: str, like: Tensor) -> Spread:
    """Return the copies of all ranks; zeros for a gradient that there is not."""
    nothing = torch.zeros_like(like)
    shape = tuple(as_real(like).shape)
    flats = [as_real(one.values.get(path, nothing)).reshape(-1) for one in told]
    return Spread(shape=shape, copies=tuple(Copy(r, 0, x) for r, x in enumerate(flats)))
