"""`diff`: run two steps, call by call from the same values, until they differ beyond rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch

from fzero.checkpoint.elements import stack_of, state_of_rank
from fzero.errors import LayoutError
from fzero.state import NAMESPACE, TrainState
from fzero.tools import rounding
from fzero.tools.diff import compare
from fzero.tools.diff.loops import Log, compare_loops, made_in
from fzero.tools.diff.record import CallRecord, Values, spacing_of, values_of, with_whole
from fzero.tools.trace.found import AsFound
from fzero.tools.trees import cast, copied, copy_of_tree, tensors_in
from fzero.transforms import simulate
from fzero.transforms.models import flatten_states, is_state
from fzero.transforms.observe import observe
from fzero.transforms.pipeline import Step

Leads = Sequence[Sequence[Values | None]]  # of each state, of each update
_InState = tuple[int, compare.Difference]  # the number of the state in a tree of them


def diff(
    run_a: Run | Callable[[Log], None],
    run_b: Run | Callable[[Log], None],
    *,
    world_size: int | tuple[int, int] = 1,
) -> compare.Difference | None:
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
    What a difference may be by rounding is computed, see `fzero/tools/rounding.py`: from
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
    if all(callable(run) and not isinstance(run, Step) for run in (run_a, run_b)):
        return compare_loops(run_a, run_b, world_size)
    run_a, run_b = _require_runs(run_a, run_b, world_size)
    dtypes = [_start_dtypes(run) for run in (run_a, run_b)]
    found = None
    with AsFound("diff", *((run.step, run.batches) for run in (run_a, run_b))) as before:
        if dtypes[0] == dtypes[1] and rounding.WIDE not in dtypes[0]:
            # A dtype is fixed somewhere; what else is wrong is raised below.
            with suppress(Exception), before.record():
                found = _compared(run_a, run_b, rounding.WIDE)
        with before.record():
            found = found or _compared(run_a, run_b, None)
            return found or _compared(run_a, run_b, None, of_bits=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A sharded step, the parameters and optimizer of its state, and its batches.

    Args:
        step: step(state, batch) -> (state, aux), as `fzero.shard` returns it. It is called several
            times for each batch: by itself it must carry nothing from call to call.
        params: whole, as for `step.init`; a pytree of models if the step has several.
        optimizer: as for `step.init`.
        batches: one for each call. Every tensor in it is [world_size, *t], the ranks first, as
            `fzero.simulate` takes it.
        world_size: W, the number of virtual ranks.
        start: a stacked state whose values, counters and loss scale it begins with, of any stage
            and number of ranks, such as `Replayed.before`; default: a new state.
    """

    step: Any
    params: Any
    optimizer: Any
    batches: Sequence[Any]
    world_size: int = 1
    start: Any = None


def _require_runs(a: Any, b: Any, world_size: Any) -> tuple[Run, Run]:
    """Return two runs; raise `LayoutError` for an argument that `diff` cannot compare."""
    if world_size != 1:
        raise LayoutError(
            f"diff: world_size={world_size!r} beside fzero.tools.Run.",
            cause="the number of ranks of a run, given to diff.",
            fix="give it to each Run: fzero.tools.Run(..., world_size=4).",
        )
    for name, run in (("run_a", a), ("run_b", b)):
        if not isinstance(run, Run) or not isinstance(run.step, Step) or not run.step.find_init():
            got = run.step if isinstance(run, Run) else run
            raise LayoutError(
                f"diff: {name} has {got!r:.80} in the place of a sharded step.",
                cause="a step without fzero.shard, or a step in the place of a run.",
                fix="give fzero.tools.Run(step=fzero.shard(step_fn, stage=...), params=..., "
                "optimizer=..., batches=..., world_size=...); or twice a training loop, run(log).",
            )
        if "simulate" in run.step.names():
            raise LayoutError(
                f"diff: the step of {name} has its own fzero.simulate.",
                cause="a step that was made to be called.",
                fix="leave it out, and give world_size=... to the run.",
            )
    if len(a.batches) != len(b.batches) or not a.batches:
        raise LayoutError(
            f"diff: run_a has {len(a.batches)} batches, run_b {len(b.batches)}.",
            cause="batches of another number of calls; or none.",
            fix="give one batch for each call of the step, as many to both.",
        )
    return a, b


def _start_dtypes(run: Run) -> set[torch.dtype]:
    """Return the floating dtypes of the initial parameters of a run."""
    return {x.dtype for x in tensors_in(run.params) if x.is_floating_point()}


def _compared(
    run_a: Run, run_b: Run, wide: torch.dtype | None, *, of_bits: bool = False
) -> compare.Difference | None:
    """Compare call by call up to rounding; or by bits, each run from its own values."""
    with made_in(wide or torch.get_default_dtype()):
        a, b = RunUnderWay(run_a, wide), RunUnderWay(run_b, wide)
        paths, call = _paths(a, b), _call_of_bits if of_bits else _call
        states = (flatten_states("diff", run.state)[0] for run in (a, b))
        logical = [[one.setup.logical for one in some] for some in states]
        if of_bits and (logical[0] != logical[1] or None in logical[0]):
            return None
        found = None if of_bits else _starts(a.values(), b.values())
        for number in range(len(run_a.batches)):
            found = found or call(a, b, number)
    if found is None:
        return None
    dtypes = _start_dtypes(run_a) | _start_dtypes(run_b)
    dtype = wide or min(dtypes, key=lambda x: x.itemsize)
    return found[1].placed(found[1].at, dtype, paths[found[0]])


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


def _starts(a: Sequence[Values], b: Sequence[Values]) -> _InState | None:
    for number, (mine, other) in enumerate(zip(a, b, strict=True)):
        for path, x in mine.leaves.items():
            if not isinstance(path, str):
                continue
            y = other.leaves[path]
            eps = max(map(rounding.eps_of, (x.dtype, y.dtype))) if x.dtype != y.dtype else 0.0
            bound = eps * x.double().abs().reshape(-1)
            if found := rounding.first_apart(rounding.whole_leaf(x), rounding.whole_leaf(y), bound):
                return number, compare.difference(compare.START, path, found)
    return None


def _call_of_bits(a: RunUnderWay, b: RunUnderWay, number: int) -> _InState | None:
    """Make a call of both, each from its own state; return the first number of other bits."""
    rng = torch.get_rng_state()
    mine = a.go_on(number, a.state)
    torch.set_rng_state(rng)
    other = b.go_on(number, b.state)
    for state in range(len(mine.before)):
        found = compare.bits_apart(mine, other, state)
        if found is not None:
            return state, replace(found[1], at=compare.Moment(number + 1, found[0], None))
    return None


def _call(a: RunUnderWay, b: RunUnderWay, number: int) -> _InState | None:
    """Call both steps from b's values. b continues with its own state."""
    start, rng = b.values(), torch.get_rng_state()
    called = b.go_on(number, b.state)
    rng_after, leads = torch.get_rng_state(), called.leads()

    def beside(a: RunUnderWay) -> tuple[compare.Called, compare.Called, compare.Spacing]:
        """Call run a, and its perturbed twin, from the values with which b began.

        After each update it continues from the values that b has then.
        """
        began = a.state_at(start, a.state)
        torch.set_rng_state(rng)
        least = max(called.seen.optimizer_unit, rounding.SMALLEST_UNIT)
        trusted = a.go_on(number, began, leads=leads, least=least)
        mine, other = trusted.seen, called.seen
        computed = min(mine.coarsest.unit, other.coarsest.unit)
        unit = max(mine.unit, other.unit, computed, rounding.SMALLEST_UNIT)
        units, size = compare.Spacing(unit, mine.optimizer_unit), rounding.DISTURBANCE * unit
        moved = [values.disturbed(size, seed) for seed, values in enumerate(start)]
        beyond = [
            [lead and lead.disturbed(size, seed) for lead in some]
            for seed, some in enumerate(leads)
        ]
        torch.set_rng_state(rng)
        _, twin = a.call(number, a.state_at(moved, began), leads=beyond, disturbance=size)
        return trusted, twin, units

    trusted, twin, units = beside(a)
    for state in range(len(start)):
        found = compare.compare(trusted, called, twin, state, units)
        if found is None:
            continue
        is_sum = found[1].operation in (compare.LOSS, compare.GRADIENT) and not found[1].ranks
        if is_sum and a.run.world_size != b.run.world_size:
            # a's step on the ranks of b says which rank of b has another term
            there = replace(a.run, batches=b.run.batches, world_size=b.run.world_size)
            with suppress(Exception):  # a step for batches of another form
                trusted, twin, units = beside(RunUnderWay(there, a.wide))
                again = compare.compare(trusted, called, twin, state, units)
                if again is not None and again[1].kind in (found[1].kind, compare.MODULE):
                    found = again
        update, first = found
        return state, replace(first, at=compare.Moment(number + 1, update, first.at.backward))
    torch.set_rng_state(rng_after)
    return None


class RunUnderWay:
    """A run in execution: its state, which each call replaces."""

    def __init__(self, run: Run, wide: torch.dtype | None) -> None:
        self.run, self.wide = run, wide
        params = run.params if wide is None else copy_of_tree(run.params, wide)
        self.state = simulate(run.step, world_size=run.world_size).init(params, run.optimizer)
        if run.start is not None:
            start = [values_of(rows) for rows in rows_of(run.start)]
            self.state = self.state_at(start, self.state)

    def values(self) -> list[Values]:
        """Return the full values of each state."""
        return [values_of(rows) for rows in rows_of(self.state)]

    def state_at(self, values: Sequence[Values], state: Any) -> Any:
        """Return the stacked states with these values in them."""
        made = [
            stack_of([with_whole(row, rank, other) for rank, row in enumerate(rows)])
            for rows, other in zip(rows_of(state), values, strict=True)
        ]
        treespec = optree.tree_structure(state, is_leaf=is_state, namespace=NAMESPACE)
        return optree.tree_unflatten(treespec, made)

    def go_on(self, number: int, state: Any, **options: Any) -> compare.Called:
        """Do one call from the current state (see `call`), and keep the new state."""
        self.state, called = self.call(number, state, **options)
        return called

    def call(
        self,
        number: int,
        state: Any,
        *,
        leads: Leads = (),
        least: float = 0.0,
        disturbance: float = 0.0,
    ) -> tuple[Any, compare.Called]:
        """Do one call from a state; return the new state and the record of the call.

        `leads`: the updates of another run, from which this one goes on; `least`: the smallest unit
        of rounding that its optimizer is taken to have. `disturbance`: change each floating element
        of the batch by so much of itself.
        """
        given, batch = copied(state), self.run.batches[number]
        states = flatten_states("diff", given)[0]
        # unless an option asks for a narrower dtype: of gradients, codecs, the optimizer
        finest = max(map(spacing_of, states)) <= rounding.eps_of(rounding.WIDE)
        widens = self.wide is not None and finest
        recording = CallRecord(len(states), leads, least, widens=widens)
        observed = observe(self.run.step, recording.observers())

        def watched(state: Any, batch: Any) -> Any:
            with recording.watching():
                new, _ = observed(state, batch)
            return new, None

        batch = batch if self.wide is None else cast(batch, self.wide)
        batch = rounding.disturbed_tree(batch, disturbance) if disturbance else batch
        with recording.trails.noted():
            new, _ = simulate(watched, world_size=self.run.world_size)(given, batch)
        return new, compare.Called(before=rows_of(state), seen=recording, after=rows_of(new))


def rows_of(state: Any) -> list[list[TrainState]]:
    """Return each state of a stacked tree, as a list over ranks."""
    return [
        [state_of_rank(x, rank) for rank in range(x.setup.axis.size)] if x.step.ndim else [x]
        for x in flatten_states("diff", state)[0]
    ]
