"""A replay under way: a state on virtual ranks, and the recorded calls that it makes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from fzero import checkpoint
from fzero.checkpoint.elements import (
    fill_module,
    generators,
    rng_setter,
    rng_text,
    state_of_rank,
    states_of_ranks,
)
from fzero.errors import LayoutError
from fzero.ranks.mesh import axis_index
from fzero.state import NAMESPACE, Setup, TrainState
from fzero.state.logical import share
from fzero.tools.record._digest import Digest, digests_of, places_of, words
from fzero.tools.record._recording import Recording, require_all_ranks
from fzero.tools.record._records import Inputs, RecordedCall, RecordedForm, Snapshot, form_of
from fzero.transforms import simulate
from fzero.transforms.pattern import blank_at
from fzero.transforms.pipeline import Step
from fzero.transforms.setup import blank_params
from fzero.transforms.shard import asked_of, sharded_as


class Replaying:
    """A replay under way: `state` is stacked over its ranks."""

    def __init__(self, recording: Recording, world_size: int, step_fn: Any) -> None:
        self.recording, self.world_size, self.step_fn = recording, world_size, step_fn
        self.state: Any = None

    def begin(self, kept: Snapshot) -> None:
        """Start from a state that was kept."""
        with kept.as_checkpoint() as path:
            self.fill(path)

    def begin_at(self, place: int) -> None:
        """Go to the state before a call, from the nearest one that was kept."""
        recording = self.recording
        number = recording.calls[place].number
        first = max((x for x in recording.kept if x.call <= number), key=lambda x: x.call)
        self.begin(first)
        for call in recording.calls[:place]:
            if call.number >= first.call:
                self.call(call)

    def fill(self, path: Path) -> None:
        """Read a checkpoint."""
        self.state = checkpoint.load(path, self.fresh(), rng=False)

    def fresh(self) -> Any:
        """Return a stacked state of the replay's form, whose values do not matter."""
        raise NotImplementedError

    def on_rank(self, state: TrainState, inputs: Inputs) -> tuple[TrainState, Any]:
        """Make one call on one rank; return the state after it, and what else there is."""
        raise NotImplementedError

    def call(self, call: RecordedCall) -> tuple[Any, ...]:
        """Make a call again; return what each rank returned beside the state."""
        ranks = self.world_size
        inputs = inputs_on(ranks, call.inputs, call.number, self.logical_ranks)
        found: list[Any] = [None] * ranks
        setters = [_setter(one) for one in call.generators]

        def body(state: TrainState) -> TrainState:
            rank = axis_index()
            setters[rank % len(setters)]()
            state, found[rank] = self.on_rank(state, inputs[rank])
            return state

        own = _setter(generators())
        try:
            self.state = simulate(body, world_size=ranks)(self.state)
        finally:
            own()
        return tuple(found)

    @property
    def logical_ranks(self) -> int | None:
        """How many logical ranks its state has; None if they are the ranks."""
        logical = state_of_rank(self.state, 0).setup.logical
        return None if logical is None else logical.ranks

    @property
    def form(self) -> RecordedForm:
        """The form of its state."""
        return form_of(state_of_rank(self.state, 0), self.recording.form.driver)

    def rows(self, digest: Digest = words) -> Tensor:
        """Return the digests [W, n] of each rank's part of the state now."""
        return torch.stack([digests_of(one, places_of(one, r), digest) for r, one in self._ranks()])

    def shown(self, state: Any) -> Any:
        """Return a state as a user has it: of one rank without the stack."""
        return state_of_rank(state, 0) if self.world_size == 1 else state

    def _ranks(self) -> Iterator[tuple[int, TrainState]]:
        return enumerate(states_of_ranks(self.state, self.world_size))


class _OfStep(Replaying):
    """Of a functional step."""

    def __init__(
        self,
        recording: Recording,
        world_size: int,
        step: Step[..., Any],
        init: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(recording, world_size, step)
        self._init = init

    def fresh(self) -> Any:
        step = simulate(self.step_fn, world_size=self.world_size)
        if self._init is not None:
            return self._init(step)
        origin, asked = self.recording.origin, asked_of(self.step_fn)
        if origin is None:
            raise LayoutError(
                "replay: a recording that was loaded has no optimizer.",
                cause="files hold tensors and texts alone.",
                fix="give init=lambda step: step.init(params, optimizer), as for the run.",
            )
        setup = origin.setup
        if asked != asked_of(self.recording.step_fn):  # a step of other options, that make its own
            return step.init(blank_params(setup.layout), setup.optimizer)

        def body() -> TrainState:
            made = self.step_fn.find_init().keywords
            pattern = replace(origin, device=torch.get_default_device(), policy=None)
            return self.step_fn.prepared(blank_at(pattern, stage=made["stage"], mesh=made["mesh"]))

        return simulate(body, world_size=self.world_size)()

    def on_rank(self, state: TrainState, inputs: Inputs) -> tuple[TrainState, Any]:
        args, kwargs = inputs
        return self.step_fn(state, *args, **kwargs)


class _OfEngine(Replaying):
    """Of an engine: one on each rank, whose state goes in and out."""

    def __init__(
        self,
        recording: Recording,
        world_size: int,
        step: Callable[..., Any],
        make: Callable[[], Any],
    ) -> None:
        super().__init__(recording, world_size, step)
        self.engines = dict[int, Any]()
        self._setup: Setup | None = None  # of rank 0: each engine has an optimizer of its own

        def body() -> TrainState:
            rank = axis_index()
            self.engines[rank] = make()
            return self._state(rank)

        self._fresh = simulate(body, world_size=world_size)()

    def fresh(self) -> Any:
        return self._fresh

    def fill(self, path: Path) -> None:
        super().fill(path)
        for rank, engine in self.engines.items():
            fill_module(path, engine, rank, self.world_size)

    def on_rank(self, state: TrainState, inputs: Inputs) -> tuple[TrainState, Any]:
        rank, (args, kwargs) = axis_index(), inputs
        self.engines[rank].state = state
        result = self.step_fn(self.engines[rank], *args, **kwargs)
        return self._state(rank), result

    def _state(self, rank: int) -> TrainState:
        """Return the state of an engine, in a record that stacks with those of other ranks."""
        state: TrainState = self.engines[rank].state
        self._setup = self._setup or state.setup
        return state.replace(setup=self._setup)


def replaying(
    recording: Recording,
    *,
    stage: int | None = None,
    world_size: int | None = None,
    step_fn: Callable[..., Any] | None = None,
    engine: Callable[[], Any] | None = None,
    init: Callable[[Any], Any] | None = None,
) -> Replaying:
    """Return a replay of a recording. Raises `LayoutError` as `replay` does."""
    require_all_ranks(recording, "a replay")
    ranks = recording.form.world_size if world_size is None else world_size
    step: Any = recording.step_fn if step_fn is None else step_fn
    if step is None:
        raise _missing("step_fn", "the step that was recorded")
    if recording.form.driver == "engine":
        if engine is None:
            raise _missing("engine", "what makes the engine, of the wanted stage")
        return _OfEngine(recording, ranks, step, engine)
    if not isinstance(step, Step) or step.find_init() is None:
        raise LayoutError(
            f"replay: {step!r:.80} has no fzero.shard in it.",
            cause="a recorder around a step that takes a state from fzero.init.",
            fix="give step_fn=fzero.shard(step, stage=...).",
        )
    shards = recording.form.shards if ranks == recording.form.world_size else ranks
    again = sharded_as(step, ranks=ranks, shards=shards, stage=stage)
    return _OfStep(recording, ranks, again, init)


def _missing(name: str, what: str) -> LayoutError:
    return LayoutError(
        f"replay: no {name}.",
        cause="a recording that was loaded, which holds no functions, or one of an engine.",
        fix=f"give {name}=: {what}.",
    )


def inputs_on(
    ranks: int, inputs: Sequence[Inputs], number: int, logical_ranks: int | None = None
) -> list[Inputs]:
    """Return the inputs of each of so many ranks: put together along dim 0, and cut evenly.

    number: of the call. With logical ranks each rank gets the rows of those that it carries. Raises
    `LayoutError` where they cannot be cut.
    """
    if ranks == len(inputs):
        return list(inputs)
    given: Any = inputs
    trees = [optree.tree_flatten(one, namespace=NAMESPACE) for one in given]
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    cut = [_cut(column, ranks, number, logical_ranks) for column in columns]
    made: Any = [
        optree.tree_unflatten(trees[0][1], [parts[rank] for parts in cut]) for rank in range(ranks)
    ]
    return made


def _cut(
    column: Sequence[Any], ranks: int, number: int, logical_ranks: int | None
) -> Sequence[Any]:
    if not isinstance(column[0], Tensor) or not column[0].ndim:
        if all(torch.equal(x, column[0]) if isinstance(x, Tensor) else x == column[0]
               for x in column[1:]):  # fmt: skip
            return [column[0]] * ranks
        seen = f"the ranks have other values of an input: {column[0]!r:.80}, ..."
    else:
        whole, parts = torch.cat(list(column)), logical_ranks or ranks
        if len(whole) % parts == 0 and (logical_ranks is None or _equal_parts(column, parts)):
            if not len(whole):
                return [whole] * ranks
            rows = len(whole) // parts
            counts = [len(share(rank, ranks, parts)) * rows for rank in range(ranks)]
            return whole.split(counts)
        seen = f"an input of {len(whole)} rows on all ranks does not go on {ranks} ranks evenly"
        if logical_ranks is not None:
            seen = f"an input of {len(whole)} rows is not equal parts of {parts} logical ranks"
    raise LayoutError(
        f"replay: call {number}: {seen}.",
        cause="inputs that belong to the ranks of the run.",
        fix="replay it on as many ranks as were recorded, or on a number that divides the rows.",
    )


def _equal_parts(column: Sequence[Tensor], parts: int) -> bool:
    """Whether each rank of the run had as many rows as its logical ranks have in equal parts."""
    rows = sum(map(len, column)) // parts
    shares = [len(share(rank, len(column), parts)) for rank in range(len(column))]
    return [len(x) for x in column] == [one * rows for one in shares]


def _setter(found: Any) -> Callable[[], None]:
    text = found if isinstance(found, str) else rng_text(found)
    return rng_setter(text, "the recording")
