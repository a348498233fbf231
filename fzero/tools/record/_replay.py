"""`replay`: any recorded update again, on virtual ranks of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fzero.tools.record._alike import apart
from fzero.tools.record._recording import Recording
from fzero.tools.record._replaying import Replaying, replaying


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
    recording: Recording,
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
    run = replaying(
        recording, stage=stage, world_size=world_size, step_fn=step_fn, engine=engine, init=init
    )
    run.begin_at(place)
    before = run.state
    aux = run.call(recording.calls[place])
    return Replayed(
        before=run.shown(before), after=run.shown(run.state), aux=aux,
        parted=_parted(recording, run, place),
    )  # fmt: skip


def _parted(recording: Recording, run: Replaying, place: int) -> tuple[str, ...] | None:
    recorded, form = recording.rows_after(place), run.form
    if recorded is None or {*form.names} != {*recording.form.names}:
        return None
    return apart(recording.form, recorded, form, run.rows()).leaves
