"""Record the programs of a step on one rank alone and on ranks among W."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fzero.context.current_rank import abstract_rank
from fzero.machine.partition import assemble
from fzero.state import NAMESPACE, TrainState
from fzero.tools.prove._budget import Budget
from fzero.tools.prove._gradient import again, marked
from fzero.tools.prove._outside import Watch
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import RecordedStep, record_step
from fzero.transforms.models import flatten_states, map_states

MOST = 64
"""Of so many ranks all are recorded."""


def ranks_of(world: int) -> tuple[int, ...]:
    """Return the ranks whose programs are recorded: all up to 64, else 16 among them.

    Example:
        >>> ranks_of(3), ranks_of(1024)[:4], ranks_of(1024)[-2:]
        ((0, 1, 2), (0, 1, 2, 3), (1022, 1023))
    """
    if world <= MOST:
        return tuple(range(world))
    inner = (i * world // 12 for i in range(1, 11))
    return (0, 1, 2, 3, *inner, world - 2, world - 1)


class ProgramRecorder:
    """Records ranks of worlds, from new states with parameters of the shapes of `state`.

    watch: has noted what the step uses beside its arguments. local: the transforms that act before
    gradients cross ranks.
    """

    def __init__(self, step: Any, state: Any, args: Any, budget: Budget, found: AsFound) -> None:
        self._step, self._args, self._budget, self._found = step, args, budget, found
        self._given, self._treespec = flatten_states("prove", state)
        setups = [one.setup.optimizer for one in self._given]
        self._optimizers: Any = optree.tree_unflatten(self._treespec, setups)
        self._schedules: dict[int, list[Any]] = {}
        self.watch, self.local = Watch(), set[str]()

    def of(self, world: int, rank: int) -> RecordedStep:
        """Return the program of a rank among `world`. On one rank gradients are marked."""
        mode = self._found.mode()
        params: Any = optree.tree_unflatten(
            self._treespec, [_params(mode, one) for one in self._given]
        )
        with self.watch, abstract_rank(rank, world):
            new = self._step.init(
                params, self._optimizers, initializer=lambda _, leaf: torch.empty_like(leaf)
            )
        if known := list(self._schedules.get(world, ())):  # that of the first rank is that of all
            new = map_states("prove", lambda one: one.replace(schedule=known.pop(0)), new)
        states = flatten_states("prove", new)[0]
        step = marked(self._step, len(states), self.local) if world == 1 else self._step
        with self.watch:
            warm = world in self._schedules  # torch looks up much as it first records
            watched = self.watch.around(self._again(step), self._budget.of_one(), warm=warm)
            made = record_step(watched, (new, *self._args), states[0].setup.axis, rank, self._found)
        self.watch.compare_draws()
        if any(new.setup != old.setup for new, old in zip(_after(made), made.states, strict=True)):
            self.watch.note("the new state has other options than the old one")
        self._schedules.setdefault(world, [one.schedule for one in made.states])
        return made

    def _again(self, step: Any) -> Any:
        """Return the step; where a call keeps something for the next one, that one follows."""

        def twice(*args: Any) -> Any:
            given: Any = args
            leaves, treespec = optree.tree_flatten(given, namespace=NAMESPACE)
            one = step(*optree.tree_unflatten(treespec, leaves))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.watch.call_ends()
                if not self._found.changed():
                    return one
                kept = AsFound("prove", *self._found.roots)
                kept.look()
            self.watch.call_begins()
            again(next(x for x in leaves if isinstance(x, Tensor)))
            other = step(*optree.tree_unflatten(treespec, leaves))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.watch.call_ends()
                if where := kept.changed():
                    self.watch.note(f"a call writes {where}, which the next call may read")
            return one[0], other[0]

        return twice


def _after(program: RecordedStep) -> list[TrainState]:
    """Return the states that come out, without numbers."""
    leaves: Any = [0] * program.result.num_leaves
    returned: Any = optree.tree_unflatten(program.result, leaves)
    return flatten_states("prove", returned[0])[0]


def record(
    step: Any, state: Any, args: Any, world: int, ranks: Sequence[int]
) -> list[RecordedStep]:
    """Record ranks of a world."""
    with AsFound("prove", step, state, args) as found:
        recorder = ProgramRecorder(step, state, args, Budget(ranks=len(ranks)), found)
        return [recorder.of(world, rank) for rank in ranks]


def _params(mode: FakeTensorMode, state: TrainState) -> Any:
    made: dict[int, Tensor] = {}
    for i, leaf in enumerate(state.setup.layout.leaves):
        meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        fake = FakeTensor(mode, meta, torch.device("cpu"))
        made[i] = fake if leaf.trainable else torch.nn.Parameter(fake, requires_grad=False)
    return assemble(state.setup.layout, made)
