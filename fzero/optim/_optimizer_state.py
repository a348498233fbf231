"""The state of fzero's own optimizers, and the transitions of its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fzero.optim._apart import Apart, Parted
from fzero.optim._stream import counted
from fzero.state import record, static


@record
class OptimizerState:
    """The optimizer state of this rank, parallel to the list of flats that `init` was given."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates; never reset
    moments: tuple[tuple[Tensor, ...], ...]  # one tuple for each moment of the rule
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit parameters; of others, empty
    steps: tuple[Tensor, ...] = ()  # updates of the leaves that are apart, as `count` is
    apart: Apart = static(default=())  # (path, 1 + index in `steps`); all others took every update


def after_update(state: OptimizerState, now: Parted, found_inf: Tensor | None) -> OptimizerState:
    """Return the state with the counters after an update; one skipped by `found_inf` adds 0."""
    counts = [state.count, *state.steps]
    counts += [counts[source].clone() for source in now.sources]
    after = [x if k in now.still else counted(x, found_inf) for k, x in enumerate(counts)]
    return replace(state, count=after[0], steps=tuple(after[1:]), apart=now.apart)


def with_steps(
    state: OptimizerState, steps: Mapping[str, int], count: int | None
) -> OptimizerState:
    """Return the state in which the leaf at each path took steps[path] updates.

    count: the updates of the whole state; None: unchanged. It is raised to the largest of `steps`.
    """
    made = max([int(state.count) if count is None else count, *steps.values()])
    numbers: dict[int, int] = {}
    apart = [
        (path, numbers.setdefault(n, 1 + len(numbers))) for path, n in steps.items() if n != made
    ]
    return replace(
        state,
        count=torch.full_like(state.count, made),
        steps=tuple(torch.full_like(state.count, n) for n in numbers),
        apart=tuple(apart),
    )
