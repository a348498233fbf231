"""`Run`, an argument of `diff`, and its execution, call by call, on virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint.elements import stack_of, state_of_rank
from fzero.errors import LayoutError
from fzero.state import NAMESPACE, TrainState
from fzero.tools.compare import cast, copied, copy_of_tree, disturbed_tree
from fzero.tools.diff._compare import Called
from fzero.tools.diff._modules import Trails
from fzero.tools.diff._record import CallRecord, Leads, spacing_of
from fzero.tools.diff._values import Values, values_of, with_whole
from fzero.transforms import simulate
from fzero.transforms.observe import observe
from fzero.transforms.pipeline import Step
from fzero.transforms.states import flatten_states, is_state


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


def rows_of(state: Any) -> list[list[TrainState]]:
    """Return each state of a stacked tree, as a list over ranks."""
    return [
        [state_of_rank(x, rank) for rank in range(x.setup.axis.size)] if x.step.ndim else [x]
        for x in flatten_states("diff", state)[0]
    ]


def _values_in(state: Any) -> list[Values]:
    return [values_of(rows) for rows in rows_of(state)]


def require_runs(a: Any, b: Any, world_size: Any) -> tuple[Run, Run]:
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


def start_dtypes(run: Run) -> set[torch.dtype]:
    """Return the floating dtypes of the initial parameters of a run."""
    leaves = optree.tree_leaves(run.params, namespace=NAMESPACE)
    return {x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()}


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


class RunUnderWay:
    """A run in execution: its state, which each call replaces."""

    def __init__(self, run: Run, wide: torch.dtype | None) -> None:
        self.run, self.wide = run, wide
        params = run.params if wide is None else copy_of_tree(run.params, wide)
        self._simulated = simulate(run.step, world_size=run.world_size)
        self.state = self._simulated.init(params, run.optimizer)
        if run.start is not None:
            self.state = self.state_at(_values_in(run.start), self.state)
        self.unit = 0.0  # of the coarsest dtype that the states of the last call ask for
        self.optimizer_unit = 0.0  # of the coarsest dtype that its optimizer works with
        self.coarsest = 0.0  # that any call computed with

    def values(self) -> list[Values]:
        """Return the full values of each state."""
        return _values_in(self.state)

    def state_at(self, values: Sequence[Values], state: Any) -> Any:
        """Return the stacked states with these values in them."""
        made = [
            stack_of([with_whole(row, rank, other) for rank, row in enumerate(rows)])
            for rows, other in zip(rows_of(state), values, strict=True)
        ]
        treespec = optree.tree_structure(state, is_leaf=is_state, namespace=NAMESPACE)
        return optree.tree_unflatten(treespec, made)

    def _is_wide(self, state: Any) -> bool:
        """Whether no option asks for a narrower dtype: of gradients, codecs, the optimizer."""
        least = torch.finfo(torch.float64).eps
        return all(spacing_of(one) <= least for one in flatten_states("diff", state)[0])

    def go_on(self, number: int, state: Any, **options: Any) -> Called:
        """Do one call from the current state (see `call`), and keep the new state."""
        self.state, called = self.call(number, state, **options)
        return called

    def call(
        self,
        number: int,
        state: Any,
        *,
        leads: Leads = (),
        optimizer_unit: float = 0.0,
        disturbance: float = 0.0,
    ) -> tuple[Any, Called]:
        """Do one call from a state; return the new state and the record of the call.

        `leads`: the updates of another run, from which this one goes on; its `optimizer_unit`.
        `disturbance`: change each floating element of the batch by so much of itself.
        """
        given = copied(state)
        trails = Trails()
        count = len(flatten_states("diff", given)[0])
        widens = self.wide is not None and self._is_wide(given)
        recording = CallRecord(count, trails, leads, optimizer_unit, widens=widens)

        def watched(state: Any, batch: Any) -> Any:
            with recording.watching(), recording.widening():
                new, _ = observed(state, batch)
            return new, None

        observed = observe(self.run.step, recording.observers())
        batch = self.run.batches[number]
        if self.wide is not None:
            batch = cast(batch, self.wide)
        if disturbance:
            batch = disturbed_tree(batch, disturbance)
        with trails.noted():
            new, _ = simulate(watched, world_size=self.run.world_size)(given, batch)
        self.unit, self.coarsest = recording.unit, max(self.coarsest, recording.watching().unit)
        self.optimizer_unit = recording.optimizer_unit
        return new, Called(before=rows_of(state), seen=recording, after=rows_of(new))
