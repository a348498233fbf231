"""`diff`: two runs, call by call from the same values, until they differ by more than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import optree
import torch

from fzero.diff._bound import DISTURBANCE, SMALLEST_UNIT, first_apart
from fzero.diff._compare import Apart, Side, Update
from fzero.diff._difference import GRADIENT, LOSS, START, Difference, Moment
from fzero.diff._record import Recording, Seen
from fzero.diff._run import Driven, Run, dtypes_of, require_runs, rows_of
from fzero.diff._values import Values, disturbed, whole
from fzero.errors import LayoutError, explain
from fzero.state import NAMESPACE, TrainState
from fzero.transforms._states import is_state

_WIDE = torch.float64


def diff(run_a: Run, run_b: Run) -> Difference | None:
    """Return the first number in which two runs differ by more than the order of sums explains.

    TODO
    """
    require_runs(run_a, run_b)
    dtypes = [dtypes_of(run) for run in (run_a, run_b)]
    if dtypes[0] == dtypes[1] and _WIDE not in dtypes[0]:
        for default in (_WIDE, torch.get_default_dtype()):
            try:
                found = _blamed(run_a, run_b, _WIDE, default)
            except Exception:  # a dtype is fixed somewhere; what else is wrong is raised below
                continue
            if found is not None:
                return found
            break
    return _blamed(run_a, run_b, None, torch.get_default_dtype())


def _blamed(
    run_a: Run, run_b: Run, wide: torch.dtype | None, default: torch.dtype
) -> Difference | None:
    """The first difference; if it is in a sum over ranks, from a's step on the ranks of b.

    That says which rank of b has another term, where the two runs have other ranks.
    """
    found = _lockstep(run_a, run_b, wide, default)
    if found is None or found.ranks or found.kind not in (LOSS, GRADIENT):
        return found
    there = replace(run_a, batches=run_b.batches, world_size=run_b.world_size)
    try:
        named = _lockstep(there, run_b, wide, default)
    except Exception:  # a step for batches of another form
        return found
    alike = named is not None and (named.at.step, named.kind) == (found.at.step, found.kind)
    return named if alike and named.ranks else found


def _lockstep(
    run_a: Run, run_b: Run, wide: torch.dtype | None, default: torch.dtype
) -> Difference | None:
    with _made_in(default):
        a, b = Driven(run_a, wide), Driven(run_b, wide)
        paths = _paths(a, b)
        found = _starts(a.values(), b.values())
        for number in range(len(run_a.batches)):
            found = found or _call(a, b, number)
    if found is None:
        return None
    state, at, apart = found
    path = ".".join([x for x in (paths[state], apart.path) if x])
    return Difference(
        at=at._replace(backward=apart.backward),
        operation=apart.operation,
        path=path,
        **apart.found._asdict(),
        compared_in=wide or min(dtypes_of(run_a) | dtypes_of(run_b), key=lambda x: x.itemsize),
    )


@contextmanager
def _made_in(default: torch.dtype) -> Iterator[None]:
    """New tensors have this dtype by default; the caller's random state stays as it was."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(default)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _paths(a: Driven, b: Driven) -> list[str]:
    """Where each state is in the tree of states. Raises `LayoutError` for other parameters."""
    trees = [
        optree.tree_flatten_with_path(run.state, is_leaf=is_state, namespace=NAMESPACE)
        for run in (a, b)
    ]
    names = [[".".join(map(str, path)) for path in paths] for paths, _, _ in trees]
    facts = [
        {f"{name}.{leaf.path} {leaf.shape}": None for name, s in zip(names[k], states, strict=True)
         for leaf in s.setup.layout.leaves}
        for k, (_, states, _) in enumerate(trees)
    ]
    if list(facts[0]) != list(facts[1]):
        only = [x.strip(".") for x in (*facts[0], *facts[1]) if x not in facts[0] or x not in facts[1]]
        raise LayoutError(
            explain(
                f"diff: the runs have other parameters: {', '.join(only[:4]) or 'in another order'}.",
                cause="two models, or parameters that were renamed.",
                fix="give both runs parameters of the same names and shapes, in the same order.",
            )
        )
    return names[0]


def _starts(a: Sequence[Values], b: Sequence[Values]) -> tuple[int, Moment, Apart] | None:
    for number, (mine, other) in enumerate(zip(a, b, strict=True)):
        for path, x in mine.params.items():
            y = other.params[path]
            bound = 0.0 if x.dtype == y.dtype else _coarser(x, y) * x.double().abs().reshape(-1)
            found = first_apart(whole(x), whole(y), bound)
            if found is not None:
                return number, Moment(0, 0, None), Apart(START, path, found)
    return None


def _coarser(x: torch.Tensor, y: torch.Tensor) -> float:
    return max(torch.finfo(z.dtype).eps for z in (x, y))


def _call(a: Driven, b: Driven, number: int) -> tuple[int, Moment, Apart] | None:
    """Make one call of both, from b's values; b goes on by itself, so that nothing of it is lost."""
    start = b.values()
    a.begin_at(start)
    befores = [run.states for run in (a, b)]
    rng = torch.get_rng_state()
    b.state, seen_b = b.call(number)
    rng_after = torch.get_rng_state()
    torch.set_rng_state(rng)
    before_a = a.state
    a.state, seen_a = a.call(number)
    unit = max(a.unit, b.unit, min(a.coarsest, b.coarsest), SMALLEST_UNIT)
    torch.set_rng_state(rng)
    size = DISTURBANCE * unit
    other = [disturbed(values, size, seed) for seed, values in enumerate(start)]
    twin_start = a.state_at(other, before_a)
    twin, seen_c = a.call(number, state=twin_start, disturbance=size)
    torch.set_rng_state(rng_after)
    runs = (
        _Called(befores[0], seen_a, a.states),
        _Called(befores[1], seen_b, b.states),
        _Called(rows_of(twin_start, a.run.world_size), seen_c, rows_of(twin, a.run.world_size)),
    )
    for state in range(len(start)):
        found = _first(runs, state, unit)
        if found is not None:
            update, apart = found
            return state, Moment(number + 1, update + 1, None), apart
    return None


class _Called:
    """One call of one run: each state's rows before it, what was seen, the rows that came back."""

    def __init__(
        self, before: list[list[TrainState]], seen: Recording, after: list[list[TrainState]]
    ) -> None:
        self.before, self.seen, self.after = before, seen, after

    def sides(self, state: int) -> list[Side]:
        """The updates of a state, and what came after the last one."""
        rows = self.before[state]
        by_rank = self.seen.updates(state, len(rows))
        averages = rows[0].setup.reduction.reduce_op == "mean"
        found = []
        for number in range(max(map(len, by_rank))):
            seen = [some[number] if number < len(some) else Seen() for some in by_rank]
            found.append(Side(before=rows, seen=seen, averages=averages))
            rows = [one.after or row for one, row in zip(seen, rows, strict=True)]
        return found


def _first(runs: Sequence[_Called], state: int, unit: float) -> tuple[int, Apart] | None:
    columns = [run.sides(state) for run in runs]
    empty = [replace(sides[-1], seen=[Seen() for _ in sides[-1].seen]) for sides in columns]
    last = 0
    for last in range(max(map(len, columns))):
        a, b, twin = (
            sides[last] if last < len(sides) else nothing
            for sides, nothing in zip(columns, empty, strict=True)
        )
        found = Update(a=a, b=b, twin=twin, unit=unit).first()
        if found is not None:
            return last, found
    a, b, twin = empty
    rows = [run.after[state] for run in runs]
    found = Update(a=a, b=b, twin=twin, unit=unit).returned(rows)
    return found and (max(last - 1, 0), found)
