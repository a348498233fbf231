"""`record`: a step that remembers its calls."""

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

from fzero import checkpoint
from fzero.checkpoint.elements import Held, generators, held_by, state_of_rank
from fzero.errors import DonatedError, LayoutError
from fzero.errors.check import check_flags, is_count, require
from fzero.state import NAMESPACE, Phase, Setup, TrainState
from fzero.tools.record._alike import unequal_ranks
from fzero.tools.record._digest import (
    Places,
    digests_of,
    places,
    places_of,
    words,
)
from fzero.tools.record._folder import StateFolder
from fzero.tools.record._recording import Recording
from fzero.tools.record._records import Inputs, RecordedCall, RecordedForm, Snapshot, form_of

WhereParted = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a recorder was asked for."""

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
        self._form: RecordedForm | None = None
        self._setup: Setup | None = None
        self._where: dict[int, Places] = {}  # of each rank of this process
        self._number = 0  # of the next call
        self._kept: list[Snapshot] = []
        self._calls: list[RecordedCall] = []
        self._folder: StateFolder | None = None
        self._after: Any = None  # what the last call has returned: a state, or the engine
        functools.update_wrapper(self, fn, updated=())

    @torch._disable_dynamo
    def __call__(self, thing: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the step. One that raises is not recorded; the state before the next one is kept."""
        held = held_by("record", thing)
        self._begin(held, thing, (args, kwargs))
        try:
            result = self._fn(thing, *args, **kwargs)
        except BaseException:
            self._calls.pop()
            raise
        self._after = thing if held.engine is not None else _state_in(result)
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
            setup=self._setup,
            home=self._folder,
        )

    def _result(self) -> tuple[int, Tensor | None]:
        try:
            held = held_by("record", self._after)
        except DonatedError:  # another step has used it up
            return self._calls[-1].updates, None
        return _updates(held.states), self._digests(held, words)

    # Before a call.

    def _begin(self, held: Held, thing: Any, inputs: Inputs) -> None:
        state = held.states[0]
        if self._setup is None or self._setup.layout is not held.setup.layout:
            self._look_at(held)
        number, self._number = self._number, self._number + 1
        if self._is_due(number) and _is_idle(state):
            self._keep(held, thing, number)
        if not self._kept:
            raise LayoutError(
                "record: the first state holds gradients.",
                cause="a recorder around a part of a step, after a gradient.",
                fix="record the whole step, from one update to the next.",
            )
        self._calls.append(
            RecordedCall(
                number=number,
                updates=_updates(held.states),
                inputs=_of_ranks(held, inputs),
                generators=(generators(),) * len(held.ranks),
                words=self._digests(held, words),
            )
        )

    def _is_due(self, number: int) -> bool:
        """Whether the state before a call is to be kept: also where the call before it raised."""
        if not self._kept:
            return True
        follows = self._calls[-1].number + 1 if self._calls else self._kept[-1].call
        return number != follows or number - self._kept[-1].call >= self._asked.every

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
        self._setup = held.setup

    def _digests(self, held: Held, digest: Any) -> Tensor | None:
        if not self._asked.digests:
            return None
        pairs = zip(held.states, self._where.values(), strict=True)
        return torch.stack([digests_of(one, where, digest) for one, where in pairs])

    def _keep(self, held: Held, thing: Any, number: int) -> None:
        """Keep the state, compare what ranks have in common, drop the oldest. A collective."""
        ranks, updates = held.processes, _updates(held.states)
        if self._folder is None:
            self._folder = StateFolder(ranks, self._asked.folder)
        path = self._folder.path / f"state-{number:08d}"
        checkpoint.save(path, thing, rng=False)
        rows = self._digests(held, places)
        self._kept.append(Snapshot(call=number, updates=updates, path=path, places=rows))
        self._compare(held, rows, updates)
        most = max(ranks.tell(sum(call.nbytes for call in self._calls)))
        while len(self._kept) > 1 and self._is_too_much(most):
            first = self._kept.pop(0)
            if ranks.axis.rank == 0:
                shutil.rmtree(first.path, ignore_errors=True)
            self._calls = [call for call in self._calls if call.number >= self._kept[0].call]
            most = max(ranks.tell(sum(call.nbytes for call in self._calls)))

    def _is_too_much(self, nbytes: int) -> bool:
        asked = self._asked
        many = asked.keep is not None and len(self._kept) > asked.keep
        return many or (asked.max_bytes is not None and nbytes > asked.max_bytes)

    def _compare(self, held: Held, rows: Tensor | None, updates: int) -> None:
        if rows is None or self._form is None:
            return
        told = [rows] if held.is_stack else held.processes.tell(rows)
        found = unequal_ranks(self._form, torch.cat(told), updates)
        if found is not None and self._asked.parted == "raise":
            raise found
        if found is not None:
            warnings.warn(str(found), stacklevel=4)


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

    Before the first call, and then before a call after every `every` calls, the state is kept.
    Since the oldest state that is kept, each call's inputs are held in host memory, with the states
    of random generators, and the digest of the state before it: 64 bits for each leaf of the
    parameters and of the optimizer's states. So a run costs its inputs, and each rank's states
    `keep` times.

    With each state that is kept, the digests of what ranks must have in common are compared.

    Args:
        fn: train_step(state, *args) -> (state, aux), with `fzero.simulate` inside of it if ranks
            are virtual; or train_step(engine, *args). The engine alone would not see labels, nor
            what happens between its forward and backward.
        every: calls from one state that is kept to the next, 1 or more.
        keep: how many states are kept, the last ones; None: all.
        digests: whether digests are made.
        folder: where states are kept, on a file system that all ranks see; default: in the memory
            of this host, /dev/shm.
        max_bytes: of the inputs and digests of a rank: the oldest states go, with the calls before
            the next one, where they are more when a state is kept.
        parted: "raise" or "warn" where ranks differ in what they must have in common.

    Returns:
        A `Recorder`, called as `fn` is; its `recording` is what `replay` and `bisect` take. Without
        `fn`, a decorator.

    Raises:
        LayoutError: for a bad option; in a call, for a state of another model or stage, and for
            several states.
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
    asked = _Asked(
        every=every,
        keep=keep,
        digests=digests,
        folder=None if folder is None else Path(folder),
        max_bytes=max_bytes,
        parted=parted,
    )
    return functools.partial(_recorder, asked) if fn is None else _recorder(asked, fn)


def _recorder(asked: _Asked, fn: Any) -> Recorder:
    require("record: the step", fn, callable, "train_step(state, *args), or (engine, *args)")
    return Recorder(fn, asked)


def _named(form: RecordedForm) -> str:
    return f"stage {form.stage} on {form.world_size} ranks, with {len(form.leaves)} leaves"


def _is_idle(state: TrainState) -> bool:
    return state.phase is Phase.IDLE and not state.progress.backwards


def _updates(states: Sequence[TrainState]) -> int:
    return int(states[0].step)


def _state_in(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) and result else result


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
