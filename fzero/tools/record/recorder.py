"""`record`: a step that remembers its calls, and tells when ranks have parted."""

from __future__ import annotations

import functools
import itertools
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fzero import checkpoint
from fzero.checkpoint import elements, engine_state
from fzero.checkpoint.collective import Ranks
from fzero.errors import DonatedError, LayoutError, MismatchError
from fzero.errors.check import check_flags, is_count, require
from fzero.state import Phase, Placement
from fzero.tools.record import files
from fzero.tools.record.digests import Digest, Places, digests_of, places, places_of, words
from fzero.tools.trees import copied, map_tensors, tensors_in
from fzero.transforms.donation import bits_are_compared
from fzero.transforms.state_entries import Pattern, pattern_of

WhereParted = Literal["raise", "warn"]


def record(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    every: int,
    keep: int | None = 2,
    digests: bool = True,
    folder: str | Path | None = None,
    max_bytes: int | None = None,
    parted: WhereParted = "raise",
) -> Any:
    """Record the calls of a step, to run any of them again, and to find where a run went wrong.

    Before the first call, and then before a call after every `every` calls, the state is kept: a
    rank copies its P / W elements to host memory. Since the oldest state that is kept, each call's
    inputs are held there, too, with the states of random generators, and the digest of the state
    before it: 64 bits for each leaf of the parameters and of the optimizer's states.

    With each state that is kept, the digests of what ranks must have in common are compared. Where
    they differ and no rank is in the minority, the calls since the state before are made again, on
    the ranks of the run: the rank that does not get what it holds is named.

    Args:
        fn: train_step(state, *args) -> (state, aux), with `fzero.simulate` inside of it if ranks
            are virtual; or train_step(engine, *args). The engine alone would not see labels, nor
            what happens between its forward and backward.
        every: calls from one state that is kept to the next, 1 or more.
        keep: how many states are kept, the last ones; None: all.
        digests: whether digests are made.
        folder: where states are kept as checkpoints, on a file system that all ranks see; default:
            in host memory.
        max_bytes: of what a rank holds in host memory, states, inputs and digests: where it would
            be more, states are kept sooner, and the oldest go, with the calls before the next one.
            (It goes by the largest call so far.)
        parted: "raise" or "warn" where ranks differ in what they must have in common.

    Returns:
        A `Recorder`, called as `fn` is; its `recording` is what `replay` and `bisect` take. Without
        `fn`, a decorator.

    Raises:
        LayoutError: for a bad option; in a call, for a state of another model or stage, for several
            states, and for `max_bytes` that two states and a call do not fit.
        AxisError: in a call inside of `fzero.simulate`: record around it.
        MismatchError: in a call, on every rank, naming the ranks that have parted.

    Example:
        >>> import torch, fzero
        >>> @fzero.record(every=2)
        ... @fzero.shard(stage=0)
        ... def step(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0)
        >>> for x in (0.5, 2.0, 1.0):
        ...     state, _ = step(state, torch.tensor(x))
        >>> step.recording
        Recording(updates 1 to 3 of a step at stage 0, all ranks of 1, 2 states, ...)
        >>> again = fzero.replay(step.recording, step=2)
        >>> fzero.full_params(again.after)["w"], again.same
        (tensor([-1.5000, -1.5000]), True)
    """
    require("record: every", every, is_count, "at least 1")
    if keep is not None:
        require("record: keep", keep, is_count, "at least 1, or None for all")
    if max_bytes is not None:
        require("record: max_bytes", max_bytes, is_count, "at least 1, or None")
    require("record: parted", parted, lambda x: x in ("raise", "warn"), '"raise" or "warn"')
    check_flags(digests=digests)

    where = None if folder is None else Path(folder)
    asked = _Asked(every, keep, digests, where, max_bytes, parted)

    def recorder(fn: Any) -> Recorder:
        require("record: the step", fn, callable, "train_step(state, *args), or (engine, *args)")
        return Recorder(fn, asked)

    return recorder if fn is None else recorder(fn)


class _Asked(NamedTuple):
    """What a recorder was asked for: see `record`."""

    every: int
    keep: int | None
    digests: bool
    folder: Path | None
    max_bytes: int | None
    parted: WhereParted


class Recorder:
    """A step that is called as before, and remembers its calls: see `record`.

    `recording` is what it holds now.
    """

    def __init__(self, fn: Callable[..., Any], asked: _Asked) -> None:
        self._fn, self._asked = fn, asked
        self._form: files.RecordedForm | None = None
        self._origin: Pattern | None = None
        self._ranks: Ranks | None = None  # the processes of the run
        self._where: dict[int, Places] = {}  # of each rank of this process
        self._number = 0  # of the next call
        self._every = asked.every  # sooner, where inputs are large
        self._kept: list[files.Snapshot] = []
        self._calls: list[files.RecordedCall] = []
        self._after: Any = None  # what the last call has returned: a state, or the engine
        functools.update_wrapper(self, fn, updated=())

    @torch._disable_dynamo
    def __call__(self, thing: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the step. One that raises is not recorded; the state before the next one is kept."""
        held = elements.local_states("record", thing, apart=True)
        self._begin(held, thing, (args, kwargs))
        try:
            with bits_are_compared():
                result = self._fn(thing, *args, **kwargs)
        except BaseException:
            self._calls.pop()
            raise
        self._after = thing if held.engine is not None else state_in(result)
        return result

    @property
    def init(self) -> Callable[..., Any]:
        """The `init` of the step."""
        return self._fn.init

    @property
    def recording(self) -> files.Recording:
        """What is held now, of this process's ranks. It does not change when the run goes on."""
        if self._form is None or not self._calls:
            raise LayoutError(
                "record: there is no recording yet.",
                cause="the step was not called, or raised.",
                fix="call it at least once.",
            )
        updates, last = self._calls[-1].updates, None
        with suppress(DonatedError):  # another step has used it up
            held = elements.local_states("record", self._after, apart=True)
            updates, last = int(held.states[0].step), self._digests(held)
        return files.Recording(
            form=self._form,
            ranks=tuple(self._where),
            kept=tuple(self._kept),
            calls=tuple(self._calls),
            updates=updates,
            last=last,
            step_fn=self._fn,
            origin=self._origin,
            processes=self._ranks,
        )

    # Before a call.

    def _begin(self, held: elements.LocalStates, thing: Any, inputs: files.Inputs) -> None:
        if self._origin is None or self._origin.setup.layout is not held.setup.layout:
            self._look_at(held)
        state, number, self._number = held.states[0], self._number, self._number + 1
        # Copies in host memory, of virtual ranks slices of what is stacked; in their own memory
        # formats: a kernel may round otherwise for another one.
        own: Any = map_tensors(
            lambda x: torch.empty_like(x, device="cpu", requires_grad=False).copy_(x.detach()),
            inputs,
        )
        of_ranks = [elements.state_of_rank(own, r) for r in held.ranks] if held.is_stack else [own]
        call = files.RecordedCall(
            number=number,
            updates=int(state.step),
            inputs=tuple(of_ranks),
            devices=tuple(x.device for x in tensors_in(inputs)),
            generators=(engine_state.generators(),) * len(held.ranks),
            words=self._digests(held),
        )
        follows = self._calls[-1].number + 1 if self._calls else -1
        after = number - self._kept[-1].call if self._kept else self._every
        is_idle = state.phase is Phase.IDLE and not state.progress.backwards
        # Also after a call that raised, which may have changed an engine.
        if is_idle and (after >= self._every or number != follows):
            self._keep(held, thing, call)
        if not self._kept:
            raise LayoutError(
                "record: the first state holds gradients.",
                cause="a recorder around a part of a step, after a gradient.",
                fix="record the whole step, from one update to the next.",
            )
        self._calls.append(call)

    def _look_at(self, held: elements.LocalStates) -> None:
        """Note the form of the first state; a later one must have it, too."""
        form = files.form_of(held.states[0], "step" if held.engine is None else "engine")
        if self._form is None:
            self._form = form
            pairs = zip(held.ranks, held.states, strict=True)
            self._where = {rank: places_of(one, rank) for rank, one in pairs}
        elif form != self._form:
            seen, before = (
                f"stage {one.stage} on {one.world_size} ranks, with {len(one.leaves)} leaves"
                for one in (form, self._form)
            )
            raise LayoutError(
                f"record: a state of {seen} after those of {before}.",
                cause="one recorder for two models, stages or optimizers.",
                fix="give each its own: fzero.record(step, ...).",
            )
        self._origin = pattern_of(held.states[0])
        self._ranks = held.processes

    def _digests(self, held: elements.LocalStates, digest: Digest = words) -> Tensor | None:
        if not self._asked.digests:
            return None
        pairs = zip(held.states, self._where.values(), strict=True)
        return torch.stack([digests_of(one, where, digest) for one, where in pairs])

    def _keep(self, held: elements.LocalStates, thing: Any, call: files.RecordedCall) -> None:
        """Keep the state, drop the oldest, compare what ranks have in common. A collective."""
        draft = elements.draft_of(held, None, rng=False, copies=self._asked.folder is None)
        rows = self._digests(held, places)
        kept = files.Snapshot(call=call.number, updates=call.updates, held=draft, places=rows)
        if self._asked.folder is not None:
            elements.write_draft(draft, path := self._asked.folder / kept.name)
            kept = replace(kept, held=path)
        earlier = self._kept[-1] if self._kept else None
        calls = [one for one in self._calls if earlier and one.number >= earlier.call]
        self._kept.append(kept)
        self._bound(held, call)
        if rows is None or self._form is None:
            return
        told = torch.cat([rows] if held.is_stack else held.processes.tell(rows))
        if (found := unequal_ranks(self._form, told)) is None:
            return
        wrong: _Wrong | None = None
        if not found.odd and earlier is not None:
            wrong = self._wrong_ranks(thing, earlier, (*calls, call), self._form)
        error = _error_of(found, call.updates, wrong)
        if self._asked.parted == "raise":
            raise error
        warnings.warn(str(error), stacklevel=4)

    def _wrong_ranks(
        self,
        thing: Any,
        kept: files.Snapshot,
        calls: Sequence[files.RecordedCall],
        form: files.RecordedForm,
    ) -> _Wrong | None:
        """Make calls again from a state that was kept. A collective, which leaves `thing` as it is.

        calls: those since that state, and the one that is to be made now.

        Returns None if every rank gets what it holds, and where the calls cannot be made again.
        """

        def first(made: Any) -> _Wrong | None:
            for call, after in itertools.pairwise(calls):
                engine_state.rng_setter(
                    engine_state.rng_text(call.generators[0]), "the recording"
                )()
                devices = iter(call.devices)
                inputs: Any = elements.stack_of(call.inputs) if held.is_stack else call.inputs[0]
                args, kwargs = map_tensors(lambda x, on=devices: x.to(next(on)), inputs)
                result = self._fn(made, *args, **kwargs)
                made = made if held.engine is not None else state_in(result)
                rows = self._digests(elements.local_states("record", made, apart=True))
                if rows is None or after.words is None or after.number != call.number + 1:
                    return None
                differ = (rows != after.words).nonzero().tolist()
                told = held.processes.tell([(held.ranks[row], leaf) for row, leaf in differ])
                if odd := [one for some in told for one in some]:
                    leaf = form.names[min(leaf for _, leaf in odd)]
                    return _Wrong(after.updates, leaf, tuple(sorted({r for r, _ in odd})))
            return None

        held = elements.local_states("record", thing, apart=True)
        own = engine_state.rng_setter(
            engine_state.rng_text(engine_state.generators()), "this process"
        )
        put_back = None if held.engine is None else _putting_back(held.engine)
        try:
            with kept.as_checkpoint() as path:
                begun = checkpoint.load(path, thing, rng=False)
            return first(begun)
        except Exception:  # the step is the user's, and may do anything but what it did before
            return None
        finally:
            if put_back is not None:
                put_back()
            own()

    def _bound(self, held: elements.LocalStates, call: files.RecordedCall) -> None:
        """Say when the next state is kept, and drop the oldest, as bytes and `keep` want it."""
        ranks, asked = held.processes, self._asked
        most = ahead = 0
        if asked.max_bytes is not None:
            largest = max(one.nbytes for one in (*self._calls, call))
            told = ranks.tell((self._kept[-1].nbytes, largest))
            state, largest = (max(some) for some in zip(*told, strict=True))
            calls = (asked.max_bytes - 2 * state) // max(largest, 1)
            if calls < 1:
                raise LayoutError(
                    f"record: max_bytes={asked.max_bytes:,} is less than two states and one call, "
                    f"2 x {state:,} + {largest:,} bytes on a rank.",
                    cause="a model or a batch that is larger than was thought.",
                    fix="allow more, or give folder=..., where states take no memory.",
                )
            self._every = min(asked.every, calls)
            most, ahead = asked.max_bytes, state + self._every * largest

        def is_too_much() -> bool:
            if asked.keep is not None and len(self._kept) > asked.keep:
                return True
            nbytes = sum(one.nbytes for one in (*self._kept, *self._calls))
            return asked.max_bytes is not None and max(ranks.tell(nbytes)) + ahead > most

        while len(self._kept) > 1 and is_too_much():
            first = self._kept.pop(0)
            if isinstance(first.held, Path) and ranks.axis.rank == 0:
                shutil.rmtree(first.held, ignore_errors=True)
            self._calls = [one for one in self._calls if one.number >= self._kept[0].call]


class Unequal(NamedTuple):
    """A leaf of which ranks have other values, where they must have the same."""

    leaf: str
    ranks: tuple[int, ...]  # that hold it, or that part of it
    odd: tuple[int, ...]  # those in the minority; () where no value is that of most of them


def unequal_ranks(form: files.RecordedForm, rows: Tensor) -> Unequal | None:
    """Return the first leaf of which ranks have other digests; None if none have.

    rows: [W, n], of all ranks.

    Example:
        >>> import torch
        >>> from fzero.tools.record.digests import DigestedLeaf
        >>> leaf = DigestedLeaf("parameter w", Placement.REPLICATED)
        >>> form = files.RecordedForm(
        ...     stage=0, world_size=3, shards=3, leaves=(leaf,), driver="step"
        ... )
        >>> unequal_ranks(form, torch.tensor([[5], [5], [4]]))
        Unequal(leaf='parameter w', ranks=(0, 1, 2), odd=(2,))
    """
    for leaf, column in zip(form.leaves, rows.unbind(1), strict=True):
        for ranks in _alike(form, leaf.placement):
            values = {rank: int(column[rank]) for rank in ranks}
            (usual, count), *others = Counter(values.values()).most_common()
            if others:
                odd = tuple(rank for rank, value in values.items() if value != usual)
                return Unequal(leaf.name, tuple(values), odd if 2 * count > len(values) else ())
    return None


def _alike(form: files.RecordedForm, placement: Placement) -> list[range]:
    """Return the ranks that must have the same of a leaf, together."""
    if form.apart:
        if placement is not Placement.REPLICATED:
            return []
        firsts = range(0, form.world_size, form.shards)
        return [range(first, first + form.shards) for first in firsts]
    # Of OVER_ALL no two ranks have the same.
    span = {Placement.REPLICATED: 1, Placement.SHARDED: form.shards}.get(placement, 0)
    return [range(shard, form.world_size, span) for shard in range(span)]


def _error_of(found: Unequal, updates: int, wrong: _Wrong | None) -> MismatchError:
    """Return the error that tells it. wrong: where a rank holds what it does not compute."""
    if found.odd:
        who = f"rank {found.odd[0]} has" if len(found.odd) == 1 else f"ranks {[*found.odd]} have"
        others = len(found.ranks) - len(found.odd)
        seen = f"{who} other values of {found.leaf} than the other {others} ranks that hold it"
    else:
        seen = f"ranks {[*found.ranks]} have several values of {found.leaf}, none of them most"
    if wrong is not None:
        ranks = ", ".join(map(str, wrong.ranks))
        seen += (
            "; the calls since the last state that was kept, made again, show "
            f"rank{'s' * (len(wrong.ranks) > 1)} {ranks} wrong first: in {wrong.leaf}, after "
            f"{wrong.updates} updates"
        )
    return MismatchError(
        f"after {updates} updates {seen}.",
        cause="a bit that flipped, hardware that computes wrong, or a write on some ranks only.",
        fix="save the recording on every rank; fzero.bisect(fzero.load_recording(folder), step) "
        "says at which update, in which leaf and on which rank it happened.",
    )


class _Wrong(NamedTuple):
    """The first state that ranks hold, and do not get when the calls before it are made again."""

    updates: int  # that were made
    leaf: str
    ranks: tuple[int, ...]


def _putting_back(engine: engine_state.EngineLike) -> Callable[[], None]:
    """Return what gives an engine its present state again, of this rank: its calls change it."""
    state, buffers = copied(engine.state), copied(engine_state.buffers_of(engine.module))
    options = engine_state.options_of(engine.optimizer)

    def put_back() -> None:
        engine.state = state
        engine_state.set_buffers(engine.module, buffers)
        engine_state.set_options(engine.optimizer, options)

    return put_back


def state_in(result: Any) -> Any:
    """Return the state in what a step has returned."""
    return result[0] if isinstance(result, tuple) and result else result
