"""`load_universal`: DeepSpeed's universal checkpoint into a state, or an engine.

Files are found sound; rank 0 reads what all parameters share (step, options, scale, buffers); then
each rank reads parameters, one at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.checkpoint._allocate import (
    are_alike,
    begun_slots,
    make_whole,
    read_leaves,
    require_equal,
    with_room,
)
from fzero.checkpoint._process_states import local_states, require_closed
from fzero.checkpoint._save import wait_for_earlier
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
    latest,
    require_dense,
    require_own,
    require_places,
    require_sound,
)
from fzero.checkpoint.collective import (
    CheckpointError,
    Ranks,
    damaged,
    from_first,
    run_on_all_ranks,
)
from fzero.checkpoint.engine_state import (
    Buffers,
    EngineLike,
    buffers_of,
    options_by_name,
    plain_options,
    require_options,
    set_options,
)
from fzero.checkpoint.folders import PathLike, path_everywhere
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError, explain
from fzero.machine.named_shards import all_paths, leaf_paths
from fzero.optim.counters import COUNT, UNSTEPPED
from fzero.optim.entries import RULE, slots_of
from fzero.state import TrainState
from fzero.state.entry import Entry
from fzero.state.setup import ParamGroups
from fzero.transforms.state_entries import VALUES, has_values, numbered, numbers_of

Thing = TypeVar("Thing")


def load_universal(
    folder: PathLike, state: Thing, *, tag: str | None = None, optimizer: bool = True
) -> Thing:
    """Return a state with the values of DeepSpeed's universal checkpoint. A collective.

    `state` says what is wanted, as for `load`; its stage and number of ranks may be any. Masters
    take the fp32 values, and parameters those, rounded to their dtype. What the optimizer keeps is
    taken by torch.optim's names; what it does not keep is left out. Each parameter goes on from the
    number of steps that it took; the most of them becomes the state's step. Options of param
    groups (lr, betas, ...) are set in the torch.optim optimizer of an engine or of `from_torch`;
    those of a rule of `fzero.optim` are fixed by code, and a warning says which are others. A loss
    scale that adapts itself takes the saved one. Of an engine's module the buffers are set.

    A frozen parameter, and one whose padded vocabulary is larger than the saved one (it grows by
    zeros), is taken, too. Into another model it goes by a state like the saved one:
    `save` that, and `load(path, other, strict=False, rename=)`.

    Each rank reads the elements that it keeps, from one parameter at a time. Everything goes into
    new memory first; the state or the engine is changed when all is read, on all ranks. The
    checksum of every file is looked at, nothing that a file says is executed, and no file outside
    of the checkpoint is read. Classes of DeepSpeed's own are passed over.

    Args:
        folder: what has latest_universal, of `save_universal` or of DeepSpeed's ds_to_universal.
        state: one state without gradients in a window, or an engine; a stacked state.
        tag: which checkpoint in `folder`; by default the one that latest_universal names.
        optimizer: False: only parameters, masters and buffers; all else stays as it is.

    Returns:
        The new state, without gradients; or the engine.

    Raises:
        CheckpointError: for a missing, damaged or foreign folder, for parameters that are missing,
            unknown, of another shape or of another step, naming file and parameter. Nothing was
            changed.
        LayoutError: for an empty path, a tag that is no name, or an optimizer or parameters that
            the layout has no place for.
        PhaseError: inside a coalesced step.

    Source: DeepSpeed 0.19, checkpoint/universal_checkpoint.py.

    Example:
        >>> import tempfile, torch, fzero
        >>> from fzero.checkpoint import load_universal, save_universal
        >>> opt = fzero.optim.sgd(1.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_universal(folder, fzero.init([torch.ones(2)], opt, stage=2), tag="first")
        ...     state = load_universal(folder, fzero.init([torch.zeros(2)], opt, stage=3))
        >>> fzero.full_params(state)
        [tensor([1., 1.])]
    """
    wait_for_earlier(raises=False)
    held = local_states("load_universal", state)
    ranks, given = held.processes, held.states[0]
    where = path_everywhere(ranks, "load_universal", folder)
    facts = [f"path {where}", f"tag {tag}", f"{optimizer=}"]
    assert_same_everywhere(facts, ranks.axis, what="the checkpoint")

    def begin() -> list[str]:
        if tag is not None and not (isinstance(tag, str) and is_name(tag)):
            raise LayoutError(
                f"load_universal: the tag {tag!r:.80} is no name of a folder.",
                cause="a path, or the number of a step.",
                fix="give the name of one folder in the path, or none for the latest.",
            )
        for one in held.states:
            require_closed(one)
        require_places("load_universal", given)
        slots = {slot.name for slot in slots_of(given) if RULE + slot.name not in VALUES}
        return [FP32, *([STEP, *sorted(slots)] if optimizer else [])]

    doing = f"read {where}"
    keys = run_on_all_ranks(ranks, begin, what=doing)
    name = from_first(ranks, lambda: latest(where) if tag is None else tag, what=doing)
    source = Folder(where / name)
    names = run_on_all_ranks(ranks, lambda: _sound_names(source, given, keys, ranks), what=doing)
    shared = from_first(
        ranks, lambda: _shared_facts(source, names, given, held.engine, optimizer), what=doing
    )

    def reads(entry: Entry) -> bool:
        return has_values(entry) or (optimizer and entry.name.startswith(RULE))

    def fill() -> list[TrainState]:
        """Return new states with the values of the files: of each flat, this rank's own shard."""
        pairs = zip(held.states, held.ranks, strict=True)
        made = [numbered(with_room(*pair, reads), shared.counters) for pair in pairs]

        def values(number: int, kind: str) -> Tensor:
            leaf, name = given.setup.layout.leaves[number], names[number]
            key = FP32 if kind in VALUES else kind.removeprefix(RULE)
            found = source.values(name, key, leaf.shape)
            if not are_alike(found.dtype, leaf.dtype):
                seen = f"has {name} as {found.dtype}, {leaf.dtype} in the state"
                raise damaged(source.root / ZERO / name, seen)
            return found

        read_leaves(held, made, reads, values)
        return made

    with torch.no_grad():
        states = run_on_all_ranks(ranks, fill, what=doing)
        make_whole(held, states, reads)
        states = begun_slots(held, states, f"load_universal: {where / name}")
    made = held.returned(states, shared.buffers)
    if shared.options:
        set_options(given.setup.optimizer.param_groups((), 0).instance, shared.options)
    if shared.differing:
        text = explain(
            "load_universal: options in the checkpoint are others than those of the rule here: "
            f"{'; '.join(shared.differing)}.",
            cause="a rule of fzero.optim has its options from code; they were not changed.",
            fix="make the rule with the options that you want, or use fzero.optim.from_torch, "
            "whose options are set.",
        )
        warnings.warn(text, UserWarning, stacklevel=2)
    return made


def _sound_names(source: Folder, state: TrainState, keys: Sequence[str], ranks: Ranks) -> list[str]:
    """Return under which name each leaf is there, one that is tied there, too; else its first.

    Raises `CheckpointError` for a damaged or unknown file; the ranks share the reading.
    """
    source.require_there()
    paths, tied = all_paths(state.setup.layout), source.tied()
    known = {path for some in paths for path in some}
    for name in source.names():
        if name not in known:
            raise damaged(
                source.root / ZERO / name, "is a parameter that this state has not, with moments"
            )
    every = ([x for path in some for x in (path, tied.get(path, path))] for some in paths)
    names = [next((x for x in some if source.holds(x)), some[0]) for some in every]
    for name in names:
        source.require_joined(name)
    held = (source.file(name, key) for name in names for key in keys)
    files = [file for file in held if file is not None]
    files += [source.root / ZERO / OPTIMIZER] if STEP in keys else []
    files += sorted(source.root.glob(f"*{STATES}"))
    for number, file in enumerate(files):
        require_own(file, source.root)
        if number % ranks.axis.size == ranks.axis.rank:
            require_sound(file)
    return names


class SharedFacts(NamedTuple):
    """What all parameters have in common, read and checked by rank 0."""

    counters: Mapping[str, Any]  # as a manifest has them
    buffers: Buffers  # of an engine's module
    options: Sequence[dict[str, Any]] = ()  # of each param group, to be set
    differing: Sequence[str] = ()  # options that are fixed by code, and others in the checkpoint


def _shared_facts(
    source: Folder,
    names: Sequence[str],
    state: TrainState,
    engine: EngineLike | None,
    optimizer: bool,
) -> SharedFacts:
    """Read and check it. Raises `CheckpointError`, naming the file, for what is wrong."""
    setup, layout = state.setup, state.setup.layout
    buffers = {} if engine is None else _buffers(source, engine)
    for paths, leaf in zip(all_paths(layout), layout.leaves, strict=True):
        some = [path for path in dict.fromkeys(paths) if source.holds(path)]
        require_equal(
            source.root, some, lambda name, leaf=leaf: source.values(name, FP32, leaf.shape)
        )
    groups = setup.optimizer.param_groups(layout.leaves, int(state.step))
    if not (optimizer and groups.options):
        return SharedFacts(numbers_of(state), buffers)
    file = source.root / ZERO / OPTIMIZER
    found = dict_in(file)
    triples = zip(names, leaf_paths(layout), groups.of_leaf, strict=True)
    stepped = {own: name for name, own, number in triples if number >= 0}
    step, steps = _steps(source, [*stepped.values()], found)
    by_leaf = dict(zip(stepped, steps, strict=True))
    counters = {
        "step": step,
        "optimizer": {COUNT: step, STEP: by_leaf},
        "scale": _scale(file, found),
        UNSTEPPED: [name for name, taken in by_leaf.items() if not taken],
    }
    now = setup.optimizer.param_groups(layout.leaves, step)
    return SharedFacts(counters, buffers, *_options(file, found, now, state, source.tied()))


def _steps(source: Folder, names: Sequence[str], found: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return how many updates were made, and how many each parameter took.

    Raises `CheckpointError` for files that contradict each other.
    """

    def contradict(here: tuple[str, float], there: tuple[str, float]) -> CheckpointError:
        seen = f"{here[1]:g} by {here[0]}, {there[1]:g} by {there[0]}"
        return damaged(source.root, f"has parameters of two steps: {seen}")

    each = {f"{ZERO}/{name}/{STEP}.pt": source.step(name) for name in names}
    taken = {place: step for place, step in each.items() if step is not None}
    if taken and len(taken) < len(each):
        silent = next(place for place in each if place not in taken)
        raise damaged(source.root / silent, f"is missing, and {next(iter(taken))} is there")
    steps: dict[str, Any] = {}
    inner = found.get("optimizer_state_dict")  # of stage 3, which has no step for a parameter
    states = inner.get("state") if isinstance(inner, dict) else None
    for number, one in states.items() if isinstance(states, dict) else ():
        if isinstance(one, dict) and STEP in one:
            place = f"{ZERO}/{OPTIMIZER}, group {number}"
            steps[place] = as_step(source.root / place, one[STEP])
    if taken:
        for place, step in steps.items():
            if step not in taken.values():
                raise contradict(next(iter(taken.items())), (place, step))
        return int(max(taken.values())), [int(taken[f"{ZERO}/{name}/{STEP}.pt"]) for name in names]
    if not steps and source.states():  # of an optimizer that counts no steps
        one, where = source.states()[0], source.root / f"*{STATES}"
        made, skipped = one.get("global_steps"), one.get("skipped_steps", 0)
        steps["global_steps"] = as_step(where, as_step(where, made) - as_step(where, skipped))
    if not steps:
        raise damaged(source.root, "says nowhere how many steps were made")
    first, step = next(iter(steps.items()))
    for place, other in steps.items():
        if other != step:
            raise contradict((first, step), (place, other))
    return int(step), [int(step)] * len(names)


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


def _buffers(source: Folder, engine: EngineLike) -> Buffers:
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


_HOW = ("foreach", "fused", "capturable", "differentiable")  # how it computes, not what


def _options(
    file: Path,
    found: Mapping[str, Any],
    here: ParamGroups,
    state: TrainState,
    tied: Mapping[str, str],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the options to set in the instance, group by group; and which differ of a rule.

    A rule of fzero.optim has its options from code: they are not set. tied: {another name of a
    parameter there: its name}.

    Raises `CheckpointError` for an instance with other param groups, or with options of another
    rule.
    """
    if not any(here.options):  # a pair of functions shows none
        return [], []
    saved = found.get("param_groups")
    if not isinstance(saved, list) or not all(isinstance(one, dict) for one in saved):
        raise damaged(file, f"has no list of param_groups, but {saved!r:.80}")
    theirs = [one.get("param_names") for one in saved]
    if all(isinstance(names, list) for names in theirs):
        plain = [{k: x for k, x in one.items() if not k.startswith("param")} for one in saved]
        theirs = [[*some, *(x for x, name in tied.items() if name in some)] for some in theirs]
        saved = options_by_name(plain, theirs, state)
    if len(saved) != len(here.options):
        if here.instance is None:
            return [], [f"{len(saved)} param groups, {len(here.options)} here"]
        raise damaged(
            file, f"has {len(saved)} param groups, the optimizer here has {len(here.options)}"
        )
    made = [
        {k: x for k, x in plain_options(some).items() if k in ours and k not in _HOW}
        for some, ours in zip(saved, here.options, strict=True)
    ]
    pairs = [
        (number, name, value, here.options[number][name])
        for number, group in enumerate(made)
        for name, value in group.items()
    ]
    if here.instance is None:
        return [], [
            f"{name}={value!r} in param group {number}, {own!r} here"
            for number, name, value, own in pairs
            if (tuple(value) if isinstance(value, list) else value)
            != (tuple(own) if isinstance(own, list) else own)
        ]
    require_options(here.instance, made)
    for number, name, value, own in pairs:
        if _kind(name, value) != _kind(name, own):
            raise CheckpointError(
                f"load_universal: param group {number} has {name}={value!r} in {file}, "
                f"{name}={own!r} here.",
                cause="an optimizer that keeps other numbers, or steps another way.",
                fix=f"make the optimizer with {name}={value!r}. Nothing was changed.",
            )
    return made, []


def _kind(name: str, value: Any) -> Any:
    """Return what of an option may not change: its type, its length, whether it is zero."""
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple | list):
        return len(value)
    if name == "momentum":
        return bool(value.item() if isinstance(value, Tensor) else value)
    return None
