"""`bisect`: the first update at which a run parts from another one, or from itself made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fzero.errors import LayoutError
from fzero.tools.diff import Difference
from fzero.tools.record._alike import LeavesApart, apart, require_same_leaves
from fzero.tools.record._digest import places
from fzero.tools.record._recording import Recording, require_all_ranks
from fzero.tools.record._records import RecordedCall
from fzero.tools.record._replaying import Replaying, replaying
from fzero.tools.record._steps import difference_of, ranks_of_other_inputs
from fzero.transforms.pipeline import Step


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
    recording: Recording,
    other: Recording | Callable[..., Any] | None = None,
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
    if isinstance(other, Recording):
        return _between(recording, other)
    if recording.last is None and not any(call.words is not None for call in recording.calls):
        raise _without_digests(recording)
    run = replaying(
        recording, stage=stage, world_size=world_size, step_fn=other, engine=engine, init=init
    )
    for place, call in enumerate(recording.calls):
        if place == 0 or call.number != recording.calls[place - 1].number + 1:
            kept = recording.state_before(call.number)
            if kept is not None:  # after a call that raised, it may be another state
                run.begin(kept)
        before = run.state
        run.call(call)
        found = _parting(recording, run, place)
        if found is not None:
            return found if other is None else _named(found, recording, run, before)
    return None


def _parting(recording: Recording, run: Replaying, place: int) -> Parting | None:
    rows = recording.rows_after(place)
    if rows is None:
        return None
    found = apart(recording.form, rows, run.form, run.rows())
    kept = recording.state_before(recording.calls[place].number + 1)
    if not found.leaves and kept is not None and kept.places is not None:
        found = apart(recording.form, kept.places, run.form, run.rows(places))
    return _found(recording, place, found, replays=1)


def _named(parting: Parting, recording: Recording, run: Replaying, before: Any) -> Parting:
    """Add what `fzero.diff` says of the recorded step, and of the one that was called instead."""
    call = next(one for one in recording.calls if one.number == parting.call)
    found = difference_of(run.step_fn, recording.step_fn, before, (call, call))
    return replace(parting, difference=found)


def _between(a: Recording, b: Recording) -> Parting | None:
    """Compare the digests of two recordings, call by call, by the updates made before."""
    for one in (a, b):
        require_all_ranks(one, "a comparison of recordings")
    require_same_leaves(a.form, b.form)
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
        found = _found(a, place, apart(a.form, mine, b.form, other), replays=0)
        if found is not None:
            return _of_both(found, a, b, place, same.get(a.calls[place].updates))
    if not compared:
        raise LayoutError(
            f"bisect: no digest of an update is in both {a!r} and {b!r}.",
            cause="recordings of other parts of a run, or without digests.",
            fix="record both with digests=True and keep=None, from the same update on.",
        )
    return None


def _of_both(
    found: Parting, a: Recording, b: Recording, place: int, other: RecordedCall | None
) -> Parting:
    """Add what is known of the call of two recordings after which their states differ.

    other: of b, from as many updates.
    """
    if place < 0 or other is None:
        return found
    call = a.calls[place]
    found = replace(found, inputs=ranks_of_other_inputs(call, other))
    if a.origin is None or not isinstance(a.step_fn, Step) or not isinstance(b.step_fn, Step):
        return found
    run = replaying(a)
    run.begin_at(place)
    return replace(
        found,
        replays=1,
        difference=difference_of(b.step_fn, a.step_fn, run.state, (other, call)),
    )


def _found(recording: Recording, place: int, found: LeavesApart, replays: int) -> Parting | None:
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


def _without_digests(recording: Recording) -> LayoutError:
    return LayoutError(
        f"bisect: {recording!r} has no digests.",
        cause="fzero.record(..., digests=False).",
        fix="record with digests.",
    )
