"""`replay` and `bisect`: recorded updates again, on virtual ranks, and where two runs part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero import checkpoint
from fzero.checkpoint import elements
from fzero.checkpoint.engine_state import generators, rng_setter, rng_text
from fzero.errors import LayoutError
from fzero.ranks.mesh import axis_index
from fzero.state import NAMESPACE, Setup, TrainState
from fzero.state.logical import share
from fzero.tools.diff import Difference, Run, diff
from fzero.tools.record import files
from fzero.tools.record.digests import Digest, digests_of, of_leaves, places, places_of, words
from fzero.tools.trees import bits_of
from fzero.transforms import simulate
from fzero.transforms.init import blank_params
from fzero.transforms.pipeline import Step
from fzero.transforms.shard import asked_of, sharded_as
from fzero.transforms.state_entries import blank_at


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """A recorded update, made again.

    Attributes:
        before: the state before the call that made it, as `fzero.simulate` gives it: stacked
            [W, ...]; on one rank a state as it is.
        after: the state after it.
        aux: of each rank: what the step returned beside the state; of an engine's all that it
            returned.
        parted: leaves whose digests after the call are others than those that were recorded; None
            where none were, or the step has other leaves.
    """

    before: Any
    after: Any
    aux: tuple[Any, ...]
    parted: tuple[str, ...] | None

    @property
    def same(self) -> bool | None:
        """Whether the bits are those of the run; None without digests."""
        return None if self.parted is None else not self.parted


def replay(
    recording: files.Recording,
    *,
    step: int,
    stage: int | None = None,
    world_size: int | None = None,
    step_fn: Callable[..., Any] | None = None,
    engine: Callable[[], Any] | None = None,
    init: Callable[[Any], Any] | None = None,
) -> Replayed:
    """Make a recorded update again: from the nearest state before it, by the recorded inputs.

    Ranks are virtual ones of this process, also where the run had processes. At the recorded stage
    and number of ranks the bits are those of the run, on the same machine; else they differ by
    rounding. On other ranks than recorded, the inputs of all ranks are put together along dim 0,
    and cut evenly. Of a run with `logical_ranks=` the bits are the same at every stage and on any
    number of ranks, which `same` confirms; each rank gets the rows of its logical ranks.

    Args:
        recording: of all ranks: of one process, or loaded.
        step: the update, counted from 1 as `state.step` counts; made by one of the recorded calls.
        stage: of the replay; default: as recorded.
        world_size: its number of ranks; default: as recorded.
        step_fn: the step that is called: default the recorded one. It is sharded, and is given to
            a state of its own optimizer's form. Of an engine: train_step(engine, *args).
        engine: makes the engine of an engine's recording, on each rank.
        init: init(step) -> a state of the step, whose values do not matter; needed where the
            recording was loaded, for files have no optimizer:
            `lambda step: step.init(params, optimizer)`.

    Returns:
        A `Replayed`.

    Raises:
        LayoutError: for an update that is not recorded, a recording of one process of several, a
            step without `fzero.shard`, and inputs that cannot be cut evenly.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).mean(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> train_step = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=2)
        >>> step = fzero.record(train_step, every=9)
        >>> state = step.init({"w": torch.ones(3)}, fzero.optim.sgd(0.5))
        >>> for _ in range(3):
        ...     state, _ = step(state, torch.arange(12.0).view(2, 2, 3))
        >>> fzero.replay(step.recording, step=2).same
        True
        >>> alone = fzero.replay(step.recording, step=2, stage=0, world_size=1)
        >>> fzero.full_params(alone.after)["w"]
        tensor([-0.5000, -0.8333, -1.1667])
    """
    place = recording.call_of(step)
    run = _Replaying(recording, stage, world_size, step_fn, engine, init)
    run.begin_at(place)
    before = run.state
    aux = run.call(recording.calls[place])
    recorded, form, parted = recording.rows_after(place), run.form, None
    if recorded is not None and {*form.names} == {*recording.form.names}:
        parted = _apart(recording.form, recorded, form, run.rows()).leaves
    return Replayed(before=run.shown(before), after=run.shown(run.state), aux=aux, parted=parted)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parting:
    """Where two runs part: equal up to the call before.

    Attributes:
        update: the first number of updates after which their states differ.
        call: that came before it, of the recording.
        leaves: that differ then: of the parameters and the optimizer's states.
        ranks: whose parts of these differ; () where stages or ranks are others.
        replays: how often calls were made again from a kept state.
        inputs: ranks to which the two recordings gave other inputs in that call.
        difference: of two sharded steps, what `fzero.diff` says of that call: the first module,
            parameter and rank; None if there is nothing, or they cannot be compared.
    """

    update: int
    call: int
    leaves: tuple[str, ...]
    ranks: tuple[int, ...]
    replays: int
    inputs: tuple[int, ...] = ()
    difference: Difference | None = None

    def __str__(self) -> str:
        shown = ", ".join(self.leaves[:4]) + (", ..." if len(self.leaves) > 4 else "")
        where = f", on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        said = (
            f"the states differ from update {self.update} on (call {self.call}): "
            f"{shown}{where if self.ranks else ''}."
        )
        if self.inputs:
            said += f" That call has other inputs on ranks {', '.join(map(str, self.inputs))}."
        return said if self.difference is None else f"{said}\n{self.difference}"


def bisect(
    recording: files.Recording,
    other: files.Recording | Callable[..., Any] | None = None,
    *,
    stage: int | None = None,
    world_size: int | None = None,
    engine: Callable[[], Any] | None = None,
    init: Callable[[Any], Any] | None = None,
) -> Parting | None:
    """Find the first update at which a recording parts from another one, or from a replay.

    Against itself (`other` is None, or the step as it should be) the calls are made again from the
    oldest state that is kept, and their digests compared with the recorded ones: a bit that
    flipped, a rate or a buffer that was changed beside the step, another machine. What was in the
    inputs is made again with them: a wrong batch shows against the recording of a sound run.

    Args:
        recording: of all ranks, with digests.
        other: a recording, whose digests are compared without a replay; a step, or a function
            train_step(engine, *args); None: what was recorded.
        stage: of the replay, as for `replay`.
        world_size: as for `replay`: on other ranks than recorded bits differ by rounding.
        engine: as for `replay`.
        init: as for `replay`.

    Returns:
        A `Parting`; None if they are equal as far as both are recorded.

    Raises:
        LayoutError: as `replay`; without digests; for recordings with no update, or with other
            leaves, in common.

    Example:
        >>> import torch, fzero
        >>> @fzero.record(every=4)
        ... @fzero.shard(stage=0)
        ... def step(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5))
        >>> for n in range(7):
        ...     state, _ = step(state, torch.ones(()))
        ...     if n == 4:
        ...         state.params.flats[0].view(torch.int32)[1] ^= 1 << 20
        >>> print(fzero.bisect(step.recording))
        the states differ from update 5 on (call 4): parameter w, on rank 0.
    """
    if isinstance(other, files.Recording):
        return _between(recording, other)
    if recording.last is None and not any(call.words is not None for call in recording.calls):
        raise LayoutError(
            f"bisect: {recording!r} has no digests.",
            cause="fzero.record(..., digests=False).",
            fix="record with digests.",
        )
    run = _Replaying(recording, stage, world_size, other, engine, init)
    for place, call in enumerate(recording.calls):
        if place == 0 or call.number != recording.calls[place - 1].number + 1:
            kept = recording.state_before(call.number)
            if kept is not None:  # after a call that raised, it may be another state
                run.begin(kept)
        before = run.state
        run.call(call)
        rows = recording.rows_after(place)
        if rows is None:
            continue
        differ = _apart(recording.form, rows, run.form, run.rows())
        kept = recording.state_before(call.number + 1)
        if not differ.leaves and kept is not None and kept.places is not None:
            differ = _apart(recording.form, kept.places, run.form, run.rows(places))
        found = _parting(recording, place, differ, replays=1)
        if found is not None and other is not None:
            steps = (run.step_fn, recording.step_fn)
            return replace(found, difference=_difference_of(*steps, before, (call, call)))
        if found is not None:
            return found
    return None


def _between(a: files.Recording, b: files.Recording) -> Parting | None:
    """Compare the digests of two recordings, call by call, by the updates made before."""
    for one in (a, b):
        files.require_all_ranks(one, "a comparison of recordings")
    _require_same_leaves(a.form, b.form)
    others = {call.updates: call.words for call in b.calls} | {b.updates: b.last}
    same = {call.updates: call for call in b.calls}
    compared = False
    for place in range(-1, len(a.calls)):
        after = a.calls[place + 1].updates if place + 1 < len(a.calls) else a.updates
        mine = a.rows_after(place) if place >= 0 else a.calls[0].words
        other = others.get(after)
        if mine is None or other is None:
            continue
        compared = True
        found = _parting(a, place, _apart(a.form, mine, b.form, other), replays=0)
        if found is None:
            continue
        theirs = same.get(a.calls[place].updates) if place >= 0 else None
        if theirs is None:
            return found
        # What is known of the call after which the states differ: b's, from as many updates.
        call = a.calls[place]
        if len(call.inputs) == len(theirs.inputs):
            pairs = enumerate(zip(call.inputs, theirs.inputs, strict=True))
            ranks = tuple(rank for rank, (x, y) in pairs if bits_of(x) != bits_of(y))
            found = replace(found, inputs=ranks)
        if a.origin is None or not isinstance(a.step_fn, Step) or not isinstance(b.step_fn, Step):
            return found
        run = _Replaying(a)
        run.begin_at(place)
        difference = _difference_of(b.step_fn, a.step_fn, run.state, (theirs, call))
        return replace(found, replays=1, difference=difference)
    if not compared:
        raise LayoutError(
            f"bisect: no digest of an update is in both {a!r} and {b!r}.",
            cause="recordings of other parts of a run, or without digests.",
            fix="record both with digests=True and keep=None, from the same update on.",
        )
    return None


def _parting(
    recording: files.Recording, place: int, found: _LeavesApart, replays: int
) -> Parting | None:
    if not found.leaves:
        return None
    calls, last = recording.calls, place + 1 == len(recording.calls)
    return Parting(
        update=recording.updates if last else calls[place + 1].updates,
        call=calls[place].number if place >= 0 else calls[0].number - 1,
        leaves=found.leaves,
        ranks=found.ranks,
        replays=replays,
    )


def _difference_of(
    trusted: Any, other: Any, before: Any, calls: tuple[files.RecordedCall, files.RecordedCall]
) -> Difference | None:
    """Return the first difference of one call of two steps, from one state, stacked over ranks.

    calls: the inputs of each. None if there is none, and if they cannot be compared: engines, steps
    that were not loaded, ranks with inputs of other shapes.
    """
    if not isinstance(trusted, Step) or not isinstance(other, Step):
        return None
    setup: Setup = before.setup
    ranks = setup.axis.size
    logical = None if setup.logical is None else setup.logical.ranks

    def around(inner: Any, state: Any, inputs: files.Inputs) -> Any:
        args, kwargs = inputs
        return inner(state, *args, **kwargs)

    def run_of(step: Step, call: files.RecordedCall) -> Run:
        inner = sharded_as(step, ranks=ranks, shards=setup.layout.ranks)
        return Run(
            step=Step("inputs", inner, around, options={}),
            params=blank_params(setup.layout),
            optimizer=setup.optimizer,
            batches=[elements.stack_of(_inputs_on(ranks, call.inputs, call.number, logical))],
            world_size=ranks,
            start=before,
        )

    try:
        return diff(run_of(trusted, calls[0]), run_of(other, calls[1]))
    except Exception:  # what bisect has found stands without it
        return None


class _LeavesApart(NamedTuple):
    """How two states differ: not at all, if no leaf does."""

    leaves: tuple[str, ...]
    ranks: tuple[int, ...]  # whose parts differ; () where the states have other forms


def _apart(
    a: files.RecordedForm, mine: Tensor, b: files.RecordedForm, other: Tensor
) -> _LeavesApart:
    """Compare the digests [W, n] of two states; of other forms, those of the whole leaves.

    Raises `LayoutError` for states of other leaves.
    """
    _require_same_leaves(a, b)
    if a == b:
        differ = mine != other
        odd = [name for name, bad in zip(a.names, differ.any(0).tolist(), strict=True) if bad]
        return _LeavesApart(
            tuple(odd), tuple(r for r, bad in enumerate(differ.any(1).tolist()) if bad)
        )
    wanted, found = (
        dict(zip(form.names, of_leaves(form.leaves, rows, form.shards).tolist(), strict=True))
        for form, rows in ((a, mine), (b, other))
    )
    return _LeavesApart(tuple(name for name, value in wanted.items() if found[name] != value), ())


def _require_same_leaves(a: files.RecordedForm, b: files.RecordedForm) -> None:
    """Raise `LayoutError` for states of other leaves."""
    if differ := {*a.names} ^ {*b.names}:
        raise LayoutError(
            f"bisect: other leaves: {', '.join(sorted(differ)[:4])}.",
            cause="another model or optimizer.",
            fix="compare runs of one model and one optimizer.",
        )


# A replay under way: a state on virtual ranks, and the recorded calls that it makes again.


class _Replaying:
    """A replay of a step, or of engines: `state` is stacked over its ranks.

    Raises `LayoutError` as `replay` does.
    """

    def __init__(
        self,
        recording: files.Recording,
        stage: int | None = None,
        world_size: int | None = None,
        step_fn: Callable[..., Any] | None = None,
        engine: Callable[[], Any] | None = None,
        init: Callable[[Any], Any] | None = None,
    ) -> None:
        files.require_all_ranks(recording, "a replay")
        form, step = recording.form, recording.step_fn if step_fn is None else step_fn
        ranks = form.world_size if world_size is None else world_size
        made_by = "what makes the engine, of the wanted stage"
        for name, given, what in (
            ("step_fn", step, "the step that was recorded"),
            ("engine", engine if form.driver == "engine" else step, made_by),
        ):
            if given is None:
                raise LayoutError(
                    f"replay: no {name}.",
                    cause="a recording that was loaded, which holds no functions, or one of an "
                    "engine.",
                    fix=f"give {name}=: {what}.",
                )
        self.recording, self.world_size = recording, ranks
        self.step_fn: Any = step
        self.engines = dict[int, Any]()  # of each rank, if it is of engines
        self.setup: Setup | None = None  # of engine 0: each engine has an optimizer of its own

        # A state of the form of the replay, whose values do not matter.
        if form.driver == "engine" and engine is not None:
            make = engine

            def of_engine() -> TrainState:
                self.engines[axis_index()] = make()
                return self._engine_state(axis_index())

            self.state = simulate(of_engine, world_size=ranks)()
            return
        if not isinstance(step, Step) or step.find_init() is None:
            raise LayoutError(
                f"replay: {step!r:.80} has no fzero.shard in it.",
                cause="a recorder around a step that takes a state from fzero.init.",
                fix="give step_fn=fzero.shard(step, stage=...).",
            )
        shards = form.shards if ranks == form.world_size else ranks
        self.step_fn = sharded_as(step, ranks=ranks, shards=shards, stage=stage)
        again = simulate(self.step_fn, world_size=ranks)
        self.state = self._blank(again) if init is None else init(again)

    def begin(self, kept: files.Snapshot) -> None:
        """Start from a state that was kept."""
        with kept.as_checkpoint() as path:
            self.state = checkpoint.load(path, self.state, rng=False)
            for rank, engine in self.engines.items():
                elements.fill_module(path, engine, rank, self.world_size)

    def begin_at(self, place: int) -> None:
        """Go to the state before a call, from the nearest one that was kept."""
        recording = self.recording
        number = recording.calls[place].number
        first = max((x for x in recording.kept if x.call <= number), key=lambda x: x.call)
        self.begin(first)
        for call in recording.calls[:place]:
            if call.number >= first.call:
                self.call(call)

    def _blank(self, step: Any) -> Any:
        """Return a stacked state as the recorded one."""
        origin = self.recording.origin
        if origin is None:
            raise LayoutError(
                "replay: a recording that was loaded has no optimizer.",
                cause="files hold tensors and texts alone.",
                fix="give init=lambda step: step.init(params, optimizer), as for the run.",
            )
        setup = origin.setup
        if asked_of(self.step_fn) != asked_of(self.recording.step_fn):  # a step of other options
            return step.init(blank_params(setup.layout), setup.optimizer)

        def body() -> TrainState:
            made = self.step_fn.find_init().keywords
            pattern = replace(origin, device=torch.get_default_device(), policy=None)
            return self.step_fn.prepared(blank_at(pattern, stage=made["stage"], mesh=made["mesh"]))

        return simulate(body, world_size=self.world_size)()

    def _engine_state(self, rank: int) -> TrainState:
        """Return the state of an engine, in a record that stacks with those of other ranks."""
        state: TrainState = self.engines[rank].state
        self.setup = self.setup or state.setup
        return state.replace(setup=self.setup)

    def call(self, call: files.RecordedCall) -> tuple[Any, ...]:
        """Make a call again; return what each rank returned beside the state."""
        ranks = self.world_size
        logical = elements.state_of_rank(self.state, 0).setup.logical
        count = None if logical is None else logical.ranks
        inputs = _inputs_on(ranks, call.inputs, call.number, count)
        found: list[Any] = [None] * ranks
        setters = [_rng_setter(one) for one in call.generators]

        def body(state: TrainState) -> TrainState:
            rank = axis_index()
            setters[rank % len(setters)]()
            args, kwargs = inputs[rank]
            if not self.engines:
                state, found[rank] = self.step_fn(state, *args, **kwargs)
                return state
            self.engines[rank].state = state
            found[rank] = self.step_fn(self.engines[rank], *args, **kwargs)
            return self._engine_state(rank)

        own = _rng_setter(generators())
        try:
            self.state = simulate(body, world_size=ranks)(self.state)
        finally:
            own()
        return tuple(found)

    @property
    def form(self) -> files.RecordedForm:
        """The form of its state."""
        return files.form_of(elements.state_of_rank(self.state, 0), self.recording.form.driver)

    def rows(self, digest: Digest = words) -> Tensor:
        """Return the digests [W, n] of each rank's part of the state now."""
        states = enumerate(elements.states_of_ranks(self.state, self.world_size))
        return torch.stack([digests_of(one, places_of(one, rank), digest) for rank, one in states])

    def shown(self, state: Any) -> Any:
        """Return a state as a user has it: of one rank without the stack."""
        return elements.state_of_rank(state, 0) if self.world_size == 1 else state


def _inputs_on(
    ranks: int, inputs: Sequence[files.Inputs], number: int, logical_ranks: int | None = None
) -> list[files.Inputs]:
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
        rows = len(whole) // parts

        def rows_of(count: int) -> list[int]:
            """Of each of so many ranks, where their logical ranks have equal parts."""
            return [len(share(rank, count, parts)) * rows for rank in range(count)]

        is_even = logical_ranks is None or [*map(len, column)] == rows_of(len(column))
        if len(whole) % parts == 0 and is_even:
            return whole.split(rows_of(ranks)) if len(whole) else [whole] * ranks
        seen = f"an input of {len(whole)} rows on all ranks does not go on {ranks} ranks evenly"
        if logical_ranks is not None:
            seen = f"an input of {len(whole)} rows is not equal parts of {parts} logical ranks"
    raise LayoutError(
        f"replay: call {number}: {seen}.",
        cause="inputs that belong to the ranks of the run.",
        fix="replay it on as many ranks as were recorded, or on a number that divides the rows.",
    )


def _rng_setter(found: Any) -> Callable[[], None]:
    text = found if isinstance(found, str) else rng_text(found)
    return rng_setter(text, "the recording")
