"""`bisect`: the first update at which a run parts from another one, or from itself made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.tools.record._recording import Recording
from fzero.tools.record._replaying import Replaying, replaying


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parting:
    """Where two runs part: equal up to the call before.

    Attributes:
        update: the first number of updates after which their states differ.
        call: that came before it, of the recording.
        leaves: that differ then: of the parameters and the optimizer's states.
        ranks: whose parts of these differ; () where stages or ranks are others.
        replays: how often calls were made again from a kept state.
    """

    update: int
    call: int
    leaves: tuple[str, ...]
    ranks: tuple[int, ...]
    replays: int

    def __str__(self) -> str:
        shown = ", ".join(self.leaves[:4]) + (", ..." if len(self.leaves) > 4 else "")
        where = f", on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return (
            f"the states differ from update {self.update} on (call {self.call}): "
            f"{shown}{where if self.ranks else ''}."
        )


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
    run.begin(recording.kept[0])
    same_form = run.world_size == recording.form.world_size
    for place, call in enumerate(recording.calls):
        run.call(call)
        rows = recording.rows_after(place)
        if rows is None:
            continue
        found = _parting(recording, run, place, rows, same_form=same_form)
        if found is not None:
            return found
    return None


def _parting(
    recording: Recording, run: Replaying, place: int, rows: Tensor, *, same_form: bool
) -> Parting | None:
    names = [leaf.name for leaf in recording.form.leaves]
    leaves, ranks = run.leaves(), ()
    if same_form and leaves == recording.form.leaves:
        differ = run.rows() != rows
        odd = [name for name, column in zip(names, differ.any(0).tolist(), strict=True) if column]
        ranks = tuple(rank for rank, row in enumerate(differ.any(1).tolist()) if row)
    else:
        wanted = dict(zip(names, recording.whole(rows).tolist(), strict=True))
        made = run.digests()
        _require_same_leaves(made, wanted)
        odd = [name for name, value in wanted.items() if made[name] != value]
    if not odd:
        return None
    return _found(recording, place, odd, ranks, replays=1)


def _between(a: Recording, b: Recording) -> Parting | None:
    """Compare the digests of two recordings, call by call, by the updates made before."""
    rows = {call.updates: call.words for call in b.calls} | {b.updates: b.last}
    names = [[leaf.name for leaf in x.form.leaves] for x in (a, b)]
    _require_same_leaves(names[0], names[1])
    compared = False
    for place in range(-1, len(a.calls)):
        after = a.calls[place + 1].updates if place + 1 < len(a.calls) else a.updates
        mine, other = a.rows_after(place), rows.get(after)
        if mine is None or other is None:
            continue
        compared = True
        pairs = zip(names[0], a.whole(mine).tolist(), strict=True)
        wanted = dict(zip(names[1], b.whole(other).tolist(), strict=True))
        odd = [name for name, value in pairs if wanted[name] != value]
        if odd:
            ranks = ()
            if a.form.leaves == b.form.leaves and mine.shape == other.shape:
                bad = (mine != other).any(1).tolist()
                ranks = tuple(rank for rank, row in enumerate(bad) if row)
            return _found(a, place, odd, ranks, replays=0)
    if not compared:
        raise LayoutError(
            f"bisect: no digest of an update is in both {a!r} and {b!r}.",
            cause="recordings of other parts of a run, or without digests.",
            fix="record both with digests=True and keep=None, from the same update on.",
        )
    return None


def _found(
    recording: Recording, place: int, odd: Sequence[str], ranks: tuple[int, ...], replays: int
) -> Parting:
    calls, last = recording.calls, place + 1 == len(recording.calls)
    return Parting(
        update=recording.updates if last else calls[place + 1].updates,
        call=calls[place].number if place >= 0 else calls[0].number - 1,
        leaves=tuple(odd),
        ranks=ranks,
        replays=replays,
    )


def _require_same_leaves(a: object, b: object) -> None:
    mine, other = set(a), set(b)  # type: ignore[call-overload]
    if mine != other:
        raise LayoutError(
            f"bisect: other leaves: {', '.join(sorted(mine ^ other)[:4])}.",
            cause="another model or optimizer.",
            fix="compare runs of one model and one optimizer.",
        )


def _without_digests(recording: Recording) -> LayoutError:
    return LayoutError(
        f"bisect: {recording!r} has no digests.",
        cause="fzero.record(..., digests=False).",
        fix="record with digests.",
    )
