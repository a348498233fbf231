"""What all parameters of a universal checkpoint share: the step, options, a scale, buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fzero.checkpoint._complete import require_equal
from fzero.checkpoint._options import options_for
from fzero.checkpoint._pickles import require_dense
from fzero.checkpoint._universal import (
    FP32,
    OPTIMIZER,
    STATES,
    STEP,
    ZERO,
    Folder,
    as_step,
    dict_in,
    is_name,
)
from fzero.checkpoint.driven import Buffers, Driven, buffers_of
from fzero.checkpoint.everywhere import CheckpointError, damaged
from fzero.machine.by_path import all_paths, leaf_paths
from fzero.optim.counters import COUNT, UNSTEPPED
from fzero.state import TrainState
from fzero.transforms.kept import numbers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """What all parameters have in common, read and checked by rank 0."""

    counters: Mapping[str, Any]  # as a manifest has them
    options: Sequence[dict[str, Any]]  # of each param group, to be set
    differing: Sequence[str]  # options that are fixed by code, and others in the checkpoint
    buffers: Buffers  # of an engine's module


def names_in(source: Folder, state: TrainState) -> list[str]:
    """Return under which name each leaf is there, one that is tied there, too; else its first."""
    tied = source.tied()
    return [
        next(
            (x for path in paths for x in (path, tied.get(path, path)) if _holds(source, x)),
            paths[0],
        )
        for paths in all_paths(state.setup.layout)
    ]


def _holds(source: Folder, name: str) -> bool:
    return is_name(name) and source.holds(name)


def shared_of(
    source: Folder,
    state: TrainState,
    engine: Driven | None,
    optimizer: bool,
) -> SharedFacts:
    """Read and check it. Raises `CheckpointError`, naming the file, for what is wrong."""
    buffers = {} if engine is None else _buffers(source, engine)
    layout = state.setup.layout
    for paths, leaf in zip(all_paths(layout), layout.leaves, strict=True):
        some = [path for path in dict.fromkeys(paths) if _holds(source, path)]
        require_equal(
            source.root, some, lambda name, leaf=leaf: source.values(name, FP32, leaf.shape)
        )
    counters = numbers_of(state)
    setup, file = state.setup, source.root / ZERO / OPTIMIZER
    groups = setup.optimizer.param_groups(setup.layout.leaves, int(state.step))
    if not (optimizer and groups.options):
        return SharedFacts(counters=counters, options=[], differing=[], buffers=buffers)
    found = dict_in(file)
    stepped = [
        name
        for name, number in zip(names_in(source, state), groups.of_leaf, strict=True)
        if number >= 0
    ]
    names = leaf_paths(setup.layout)
    own = [name for name, number in zip(names, groups.of_leaf, strict=True) if number >= 0]
    step, steps = _steps(source, stepped, found)
    by_leaf = dict(zip(own, steps, strict=True))
    counters = {
        "step": step,
        "optimizer": {COUNT: step, STEP: by_leaf},
        "scale": _scale(file, found),
        UNSTEPPED: [name for name, taken in by_leaf.items() if not taken],
    }
    now = setup.optimizer.param_groups(setup.layout.leaves, step)
    options, differing = options_for(file, found, now, state, source.tied())
    return SharedFacts(counters=counters, options=options, differing=differing, buffers=buffers)


def _steps(source: Folder, names: Sequence[str], found: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return how many updates were made, and how many each parameter took.

    Raises `CheckpointError` for files that contradict each other.
    """
    told = {f"{ZERO}/{name}/{STEP}.pt": source.step(name) for name in names}
    silent = [place for place, step in told.items() if step is None]
    taken = {place: step for place, step in told.items() if step is not None}
    if silent and taken:
        raise damaged(source.root / silent[0], f"is missing, and {next(iter(taken))} is there")
    steps: dict[str, Any] = {}
    inner = found.get("optimizer_state_dict")  # of stage 3, which has no step for a parameter
    each = inner.get("state") if isinstance(inner, dict) else None
    for number, one in each.items() if isinstance(each, dict) else ():
        if isinstance(one, dict) and STEP in one:
            place = f"{ZERO}/{OPTIMIZER}, group {number}"
            steps[place] = as_step(source.root / place, one[STEP])
    if taken:
        for place, step in steps.items():
            if step not in taken.values():
                raise _contradict(source, next(iter(taken.items())), (place, step))
        return int(max(taken.values())), [int(taken[f"{ZERO}/{x}/{STEP}.pt"]) for x in names]
    if not steps and source.states():  # of an optimizer that counts no steps
        one = source.states()[0]
        made, skipped = one.get("global_steps"), one.get("skipped_steps", 0)
        where = source.root / f"*{STATES}"
        steps["global_steps"] = as_step(where, as_step(where, made) - as_step(where, skipped))
    if not steps:
        raise damaged(source.root, "says nowhere how many steps were made")
    first, step = next(iter(steps.items()))
    for place, other in steps.items():
        if other != step:
            raise _contradict(source, (first, step), (place, other))
    return int(step), [int(step)] * len(names)


def _contradict(
    source: Folder, one: tuple[str, float], other: tuple[str, float]
) -> CheckpointError:
    return damaged(
        source.root,
        f"has parameters of two steps: {one[1]:g} by {one[0]}, {other[1]:g} by {other[0]}",
    )


def _scale(file: Path, found: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss scale, if one that adapts itself was saved; its counts begin anew."""
    scale = found.get("loss_scale")
    if scale is None and found.get("dynamic_loss_scale") is True:
        inside = getattr(found.get("loss_scaler"), "state", None)
        scale = inside.get("cur_scale") if isinstance(inside, dict) else None
    if scale is None:
        return {}
    if type(scale) not in (int, float) or not 0 < scale < 3.5e38:
        raise damaged(file, f"has the loss scale {scale!r:.80}")
    return {"scale": float(scale)}


def _buffers(source: Folder, engine: Driven) -> Buffers:
    """Return the buffers of the module that the checkpoint has, those of rank 0."""
    states = source.states()
    saved = states[0].get("module") if states else None
    found = {}
    for name, own in buffers_of(engine.module).items():
        if isinstance(saved, dict) and name in saved:
            where = source.root / f"*{STATES}"
            values = require_dense(where, saved[name])
            if values.shape != own.shape:
                seen = f"has {name} of {tuple(values.shape)}, {tuple(own.shape)} in the module"
                raise damaged(where, seen)
            found[name] = values.clone()
    return found
