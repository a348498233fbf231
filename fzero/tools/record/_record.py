"""`record`: a step that remembers its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero.errors.check import check_flags, is_count, require
from fzero.tools.record._recorder import Recorder, RecorderOptions, WhereParted


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
    asked = RecorderOptions(
        every=every,
        keep=keep,
        digests=digests,
        folder=None if folder is None else Path(folder),
        max_bytes=max_bytes,
        parted=parted,
    )
    return functools.partial(_recorder, asked) if fn is None else _recorder(asked, fn)


def _recorder(asked: RecorderOptions, fn: Any) -> Recorder:
    require("record: the step", fn, callable, "train_step(state, *args), or (engine, *args)")
    return Recorder(fn, asked)
