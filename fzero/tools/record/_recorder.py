"""`Recorder`: what `record` returns, a step that remembers its calls."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from fzero.checkpoint.elements import (
    Held,
    draft_of,
    generators,
    held_by,
    state_of_rank,
    write_draft,
)
from fzero.checkpoint.everywhere import Ranks
from fzero.errors import DonatedError, LayoutError
from fzero.state import NAMESPACE, Phase, TrainState
from fzero.tools.record._again import Wrong, state_in, wrong_ranks
from fzero.tools.record._alike import error_of, unequal_ranks
from fzero.tools.record._digest import Digest, Places, digests_of, places, places_of, words
from fzero.tools.record._recording import Recording
from fzero.tools.record._records import (
    Inputs,
    RecordedCall,
    RecordedForm,
    Snapshot,
    form_of,
)
from fzero.transforms.donation import bits_are_compared
from fzero.transforms.pattern import Pattern, pattern_of

WhereParted = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOptions:
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

    def __init__(self, fn: Callable[..., Any], asked: RecorderOptions) -> None:
        self._fn, self._asked = fn, asked
        self._form: RecordedForm | None = None
        self._origin: Pattern | None = None
        self._ranks: Ranks | None = None  # the processes of the run
        self._where: dict[int, Places] = {}  # of each rank of this process
        self._number = 0  # of the next call
        self._every = asked.every  # sooner, where inputs are large
        self._kept: list[Snapshot] = []
        self._calls: list[RecordedCall] = []
        self._after: Any = None  # what the last call has returned: a state, or the engine
        functools.update_wrapper(self, fn, updated=())

    @torch._disable_dynamo
    def __call__(self, thing: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the step. One that raises is not recorded; the state before the next one is kept."""
        held = held_by("record", thing, apart=True)
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
    def recording(self) -> Recording:
        """What is held now, of this process's ranks. It does not change when the run goes on."""
        if self._form is None or not self._calls:
            raise LayoutError(
                "record: there is no recording yet.",
                cause="the step was not called, or raised.",
                fix="call it at least once.",
            )
        updates, last = self._result()
        return Recording(
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

    def _result(self) -> tuple[int, Tensor | None]:
        try:
            held = held_by("record", self._after, apart=True)
        except DonatedError:  # another step has used it up
            return self._calls[-1].updates, None
        return _updates(held.states), self._digests(held)

    # Before a call.

    def _begin(self, held: Held, thing: Any, inputs: Inputs) -> None:
        if self._origin is None or self._origin.setup.layout is not held.setup.layout:
            self._look_at(held)
        number, self._number = self._number, self._number + 1
        call = RecordedCall(
            number=number,
            updates=_updates(held.states),
            inputs=_of_ranks(held, inputs),
            devices=_devices(inputs),
            generators=(generators(),) * len(held.ranks),
            words=self._digests(held),
        )
        if self._is_due(number) and _is_idle(held.states[0]):
            self._keep(held, thing, call)
        if not self._kept:
            raise LayoutError(
                "record: the first state holds gradients.",
                cause="a recorder around a part of a step, after a gradient.",
                fix="record the whole step, from one update to the next.",
            )
        self._calls.append(call)

    def _is_due(self, number: int) -> bool:
        """Whether the state before a call is to be kept: also where the call before it raised."""
        if not self._kept:
            return True
        follows = self._calls[-1].number + 1 if self._calls else self._kept[-1].call
        return number != follows or number - self._kept[-1].call >= self._every

    def _look_at(self, held: Held) -> None:
        """Note the form of the first state; a later one must have it, too."""
        form = form_of(held.states[0], "step" if held.engine is None else "engine")
        if self._form is None:
            self._form = form
            pairs = zip(held.ranks, held.states, strict=True)
            self._where = {rank: places_of(one, rank) for rank, one in pairs}
        elif form != self._form:
            raise LayoutError(
                f"record: a state of {_named(form)} after those of {_named(self._form)}.",
                cause="one recorder for two models, stages or optimizers.",
                fix="give each its own: fzero.record(step, ...).",
            )
        self._origin = pattern_of(held.states[0])
        self._ranks = held.processes

    def _digests(self, held: Held, digest: Digest = words) -> Tensor | None:
        if not self._asked.digests:
            return None
        pairs = zip(held.states, self._where.values(), strict=True)
        return torch.stack([digests_of(one, where, digest) for one, where in pairs])

    def _keep(self, held: Held, thing: Any, call: RecordedCall) -> None:
        """Keep the state, drop the oldest, compare what ranks have in common. A collective."""
        draft = draft_of(held, None, rng=False, frozen=True, copies=self._asked.folder is None)
        rows = self._digests(held, places)
        kept = Snapshot(call=call.number, updates=call.updates, held=draft, places=rows)
        if self._asked.folder is not None:
            path = self._asked.folder / kept.name
            write_draft(draft, path)
            kept = Snapshot(call=call.number, updates=call.updates, held=path, places=rows)
        earlier = self._kept[-1] if self._kept else None
        calls = [one for one in self._calls if earlier and one.number >= earlier.call]
        self._kept.append(kept)
        self._bound(held, call)
        if rows is not None:
            self._compare(held, thing, rows, call, earlier, calls)

    def _bound(self, held: Held, call: RecordedCall) -> None:
        """Say when the next state is kept, and drop the oldest, as bytes and `keep` want it."""
        ranks, asked = held.processes, self._asked
        most = ahead = 0
        if asked.max_bytes is not None:
            largest = max(one.nbytes for one in (*self._calls, call))
            told = ranks.tell((self._kept[-1].nbytes, largest))
            state, largest = (max(some) for some in zip(*told, strict=True))
            calls = (asked.max_bytes - 2 * state) // max(largest, 1)
            if calls < 1:
                raise _too_large(asked.max_bytes, state, largest)
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

    def _compare(
        self,
        held: Held,
        thing: Any,
        rows: Tensor,
        call: RecordedCall,
        earlier: Snapshot | None,
        calls: Sequence[RecordedCall],
    ) -> None:
        """Tell, or raise, that ranks have parted; calls: those since the state kept earlier."""
        if self._form is None:
            return
        told = torch.cat([rows] if held.is_stack else held.processes.tell(rows))
        found = unequal_ranks(self._form, told)
        if found is None:
            return
        wrong: Wrong | None = None
        if not found.odd and earlier is not None:
            wrong = wrong_ranks(self._fn, thing, earlier, (*calls, call), self._form, self._digests)
        error = error_of(found, call.updates, wrong)
        if self._asked.parted == "raise":
            raise error
        warnings.warn(str(error), stacklevel=4)


def _too_large(max_bytes: int, state: int, call: int) -> LayoutError:
    return LayoutError(
        f"record: max_bytes={max_bytes:,} is less than two states and one call, "
        f"2 x {state:,} + {call:,} bytes on a rank.",
        cause="a model or a batch that is larger than was thought.",
        fix="allow more, or give folder=..., where states take no memory.",
    )


def _named(form: RecordedForm) -> str:
    return f"stage {form.stage} on {form.world_size} ranks, with {len(form.leaves)} leaves"


def _is_idle(state: TrainState) -> bool:
    return state.phase is Phase.IDLE and not state.progress.backwards


def _updates(states: Sequence[TrainState]) -> int:
    return int(states[0].step)


def _tensors(inputs: Inputs) -> list[Tensor]:
    tree: Any = inputs
    return [x for x in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(x, Tensor)]


def _devices(inputs: Inputs) -> tuple[torch.device, ...]:
    return tuple(x.device for x in _tensors(inputs))


def _of_ranks(held: Held, inputs: Inputs) -> tuple[Inputs, ...]:
    """Copy the inputs of each rank to host memory: of virtual ones, slices of what is stacked."""

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # In its own memory format: a kernel may round otherwise for another one.
        return torch.empty_like(x, device="cpu", requires_grad=False).copy_(x.detach())

    tree: Any = inputs
    own: Any = optree.tree_map(copied, tree, namespace=NAMESPACE)
    if not held.is_stack:
        return (own,)
    return tuple(state_of_rank(own, rank) for rank in held.ranks)
