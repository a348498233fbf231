"""`diff`: run two steps, call by call from the same values, until they differ beyond rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.state import NAMESPACE
from fzero.tools.compare import DISTURBANCE, SMALLEST_UNIT, first_apart, whole_leaf
from fzero.tools.diff._bits import bits_apart, owes_bits
from fzero.tools.diff._compare import Called, compare
from fzero.tools.diff._difference import (
    GRADIENT,
    LOSS,
    MODULE,
    START,
    Difference,
    Moment,
    difference_of,
)
from fzero.tools.diff._log import Log
from fzero.tools.diff._loops import compare_loops, is_loop, sizes_of
from fzero.tools.diff._pair import Spacing
from fzero.tools.diff._record import Leads
from fzero.tools.diff._run import Run, RunUnderWay, made_in, require_runs, start_dtypes
from fzero.tools.diff._side import Apart
from fzero.tools.diff._values import Values, disturbed
from fzero.tools.trace.found import AsFound
from fzero.transforms.states import is_state

_WIDE = torch.float64


def diff(
    run_a: Run | Callable[[Log], None],
    run_b: Run | Callable[[Log], None],
    *,
    world_size: int | tuple[int, int] = 1,
) -> Difference | None:
    """Return the first number in which two runs differ by more than another order of sums explains.

    Both make one call after another on virtual ranks in this process. Stage, world, precision and
    options may differ, the step and the loss may be other versions; the parameters must have the
    same names, shapes and values, and the batches of all ranks the same examples. Each call of a
    begins with the parameters, optimizer state, counters, loss scale and random state that b has
    there; each update of a begins with the gradients that b's optimizer is given, and a goes on
    from what b has after it. So differences do not grow; b goes on by itself, so that what it
    should not have kept shows. In each update are compared, in this order:

        gather                  the full values that a loss reads, and those that ranks hold
        loss                    L = sum_i s_i mean_r L_ri, i the backwards, s_i what `accumulate`
                                multiplies by
        gradient                dL/dp, added up here from each rank's own gradients
        module                  where one of these two differs: what each `nn.Module` of the forward
                                is given and returns, up to the first one that differs
        reduction, norm, clip   the gradient that the update begins with, its norm, and what the
                                optimizer is given; without the loss scale
        optimizer state, update     each slot; p' - p, and that of fp32 masters
        counter, loss scale, state  what was counted, and what the step makes of it after the update

    Each rank's part of a shard, and each replica, is compared by itself. `replica`: a number that
    is not bit for bit the same on all ranks of one run that have it.

    If both runs have parameters of the same dtypes, they are compared in float64 first, where
    rounding is small, and then as they are. There casts to other floats, `x.float()` or
    `x.bfloat16()`, do nothing, unless an option asks for a narrow dtype (autocast, a codec).
    What a difference may be by rounding is computed, see `fzero/tools/compare/_rounding.py`: from
    the terms of sums over ranks and micro-batches, and elsewhere by what a small change of all
    parameters and inputs makes of the same number, or of the gradients and slots of an update. It
    goes by the coarsest dtype that the options ask for: autocast, codecs.

    Where both runs have the same `logical_ranks=` and seed, nothing is left to rounding: if no
    difference was found so far, each run is made again from its own values, and losses, gradients,
    optimizer states and parameters must have the same bits, whatever ranks carry them.

    Training loops are compared as well, of plain PyTorch and of an engine: run(log), which calls
    log.start(model), and in each step log.loss(loss), log.gradients(model) and
    log.parameters(model); of an engine it gives the engine. Each goes on from its own values, and
    run_a is made a second time from others, so that what rounding explains grows with the steps.

    Args:
        run_a: the run that is trusted.
        run_b: the other one. Both are a `fzero.tools.Run`, or both a function run(log).
        world_size: of functions: on how many virtual ranks run_b runs (run_a on one); or a pair,
            of run_a and of run_b.

    Returns:
        The first `Difference`; None if there is none. Print it: it says what differs, by how much,
        what was equal until then, and what usually makes it differ.

    Raises:
        LayoutError: for what is no run of a sharded step, for other numbers of batches, and for
            runs of other parameters, which it names.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 4.2.

    Example:
        >>> import torch, fzero
        >>> def step_of(factor):
        ...     def loss(p, x):
        ...         return factor * (p["w"] * x).square().mean()
        ...     def step_fn(state, x):
        ...         state, value = fzero.grad_and_reduce(loss, state)(x)
        ...         return fzero.apply_gradients(state), value
        ...     return fzero.shard(step_fn, stage=2)
        >>> def run(step, world_size):
        ...     x = torch.arange(12.0).view(world_size, -1, 3)
        ...     return fzero.tools.Run(step=step, params={"w": torch.ones(3)}, batches=[x],
        ...                      optimizer=fzero.optim.adam(0.1), world_size=world_size)
        >>> fzero.diff(run(step_of(1), 1), run(step_of(1), 4)) is None
        True
        >>> found = fzero.diff(run(step_of(1), 1), run(step_of(2), 4))
        >>> found.operation, found.ranks, found.at
        ('loss', (0, 1, 2, 3), Moment(step=1, update=1, backward=1))
    """
    if is_loop(run_a) and is_loop(run_b):
        return compare_loops(run_a, run_b, sizes_of(world_size))
    run_a, run_b = require_runs(run_a, run_b, world_size)
    dtypes = [start_dtypes(run) for run in (run_a, run_b)]
    found = None
    with AsFound("diff", *((run.step, run.batches) for run in (run_a, run_b))) as before:
        if dtypes[0] == dtypes[1] and _WIDE not in dtypes[0]:
            # A dtype is fixed somewhere; what else is wrong is raised below.
            with suppress(Exception), before.record():
                found = _compared(run_a, run_b, _WIDE)
        with before.record():
            return found or _compared(run_a, run_b, None) or _of_bits(run_a, run_b)


def _of_bits(run_a: Run, run_b: Run) -> Difference | None:
    """Compare by bits, each run from its own values, where both have the same logical ranks."""
    with made_in(torch.get_default_dtype()):
        a, b = RunUnderWay(run_a, None), RunUnderWay(run_b, None)
        if not owes_bits(a, b):
            return None
        for number in range(len(run_a.batches)):
            found = bits_apart(a, b, number)
            if found is not None:
                return _said(run_a, run_b, found, None, _paths(a, b))
    return None


def _compared(run_a: Run, run_b: Run, wide: torch.dtype | None) -> Difference | None:
    with made_in(wide or torch.get_default_dtype()):
        a, b = RunUnderWay(run_a, wide), RunUnderWay(run_b, wide)
        paths = _paths(a, b)
        found = _starts(a.values(), b.values())
        for number in range(len(run_a.batches)):
            found = found or _call(a, b, number)
    return found and _said(run_a, run_b, found, wide, paths)


def _said(
    run_a: Run,
    run_b: Run,
    found: tuple[int, Moment, Apart],
    wide: torch.dtype | None,
    paths: list[str],
) -> Difference:
    state, at, apart = found
    dtypes = start_dtypes(run_a) | start_dtypes(run_b)
    return difference_of(
        at, apart, wide or min(dtypes, key=lambda x: x.itemsize), prefix=paths[state]
    )


def _paths(a: RunUnderWay, b: RunUnderWay) -> list[str]:
    """Return the path of each state. Raises `LayoutError` if parameters of a and b differ."""
    names, leaves = [], []
    for run in (a, b):
        paths, states, _ = optree.tree_flatten_with_path(
            run.state, is_leaf=is_state, namespace=NAMESPACE
        )
        names = [".".join(map(str, path)) for path in paths]
        leaves.append(
            [
                f"{name}.{leaf.path} {leaf.shape}".lstrip(".")
                for name, state in zip(names, states, strict=True)
                for leaf in state.setup.layout.leaves
            ]
        )
    if leaves[0] != leaves[1]:
        shown = ", ".join(sorted({*leaves[0]} ^ {*leaves[1]})[:4]) or "in another order"
        raise LayoutError(
            f"diff: the runs have other parameters: {shown}.",
            cause="two models, or parameters that were renamed.",
            fix="give both runs parameters of the same names and shapes, in the same order.",
        )
    return names


def _starts(a: Sequence[Values], b: Sequence[Values]) -> tuple[int, Moment, Apart] | None:
    for number, (mine, other) in enumerate(zip(a, b, strict=True)):
        for path, x in mine.params.items():
            y = other.params[path]
            eps = 0.0 if x.dtype == y.dtype else max(torch.finfo(z.dtype).eps for z in (x, y))
            bound = eps * x.double().abs().reshape(-1)
            found = first_apart(whole_leaf(x), whole_leaf(y), bound)
            if found is not None:
                return number, Moment(0, 0, None), Apart(START, path, found)
    return None


class _Trusted(NamedTuple):
    """A call of run a from b's values, its perturbed twin, and their units of rounding."""

    called: Called
    twin: Called
    units: Spacing


def _call(a: RunUnderWay, b: RunUnderWay, number: int) -> tuple[int, Moment, Apart] | None:
    """Call both steps from b's values. b continues with its own state."""
    start, rng = b.values(), torch.get_rng_state()
    called = b.go_on(number, b.state)
    rng_after = torch.get_rng_state()
    leads = called.leads()
    trusted = _beside(a, b, start, leads, number, rng)
    for state in range(len(start)):
        found = compare(trusted.called, called, trusted.twin, state, trusted.units)
        if found is not None:
            there = _named(a, b, start, leads, number, rng) if _is_sum(found[1]) else None
            if there is not None:  # a's step on the ranks of b
                again = compare(there.called, called, there.twin, state, there.units)
                if again is not None and again[1].kind in (found[1].kind, MODULE):
                    found = again
            update, apart = found
            return state, Moment(number + 1, update, apart.backward), apart
    torch.set_rng_state(rng_after)
    return None


def _beside(
    a: RunUnderWay, b: RunUnderWay, start: list[Values], leads: Leads, number: int, rng: Tensor
) -> _Trusted:
    """Call run a, and its perturbed twin, from the values with which b began.

    After each update it continues from the values that b has then.
    """
    began = a.state_at(start, a.state)
    torch.set_rng_state(rng)
    least = max(b.optimizer_unit, SMALLEST_UNIT)
    called = a.go_on(number, began, leads=leads, optimizer_unit=least)
    unit = max(a.unit, b.unit, min(a.coarsest, b.coarsest), SMALLEST_UNIT)
    units, size = Spacing(unit, a.optimizer_unit), DISTURBANCE * unit
    other = [disturbed(values, size, seed) for seed, values in enumerate(start)]
    beyond = [
        [lead and lead.disturbed(size, seed) for lead in some] for seed, some in enumerate(leads)
    ]
    torch.set_rng_state(rng)
    _, twin = a.call(number, a.state_at(other, began), leads=beyond, disturbance=size)
    return _Trusted(called, twin, units)


def _is_sum(apart: Apart) -> bool:
    return apart.operation in (LOSS, GRADIENT) and not apart.found.ranks


def _named(
    a: RunUnderWay, b: RunUnderWay, start: list[Values], leads: Leads, number: int, rng: Tensor
) -> _Trusted | None:
    """Call a's step on the ranks of b, to find which rank of b has another term."""
    if a.run.world_size == b.run.world_size:
        return None
    there = replace(a.run, batches=b.run.batches, world_size=b.run.world_size)
    try:
        return _beside(RunUnderWay(there, a.wide), b, start, leads, number, rng)
    except Exception:  # a step for batches of another form
        return None
