"""DeepSpeed's universal checkpoint: which file has what, read one parameter at a time.

    folder/latest_universal              the name of the checkpoint that counts
    folder/<tag>/zero/<parameter>/       fp32.pt: the values; exp_avg.pt, exp_avg_sq.pt, ...: what
                                         the optimizer keeps; each {"param": [shape], ...} or, from
                                         stage 3, [numel]; step.pt: a number
    folder/<tag>/zero/optimizer_state.pt param groups, and more that all parameters share
    folder/<tag>/*model_states.pt        buffers, counters

A conversion that was cut off has a parameter in slices, which are refused:

    folder/<tag>/tmp/<parameter>/<tensor-parallel rank>/fp32.<data-parallel rank>, ...

Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py and checkpoint/universal_checkpoint.py.

Nothing that is in a file is run. A file of torch.save is a zip of one pickle and the bytes of its
tensors. torch.load's `weights_only` builds tensors, numbers, strings and containers, and refuses a
pickle that names anything else. A few classes of DeepSpeed, which its checkpoints have beside their
tensors, become stand-ins here that keep what they were made of. The checksums of the zip, which
torch.load does not look at, are looked at here.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fzero.checkpoint import _allocate, engine_state, folders
from fzero.checkpoint._process_states import (
    local_states,
    require_closed,
    require_idle,
    whole_leaves,
)
from fzero.checkpoint._save import wait_for_earlier
from fzero.checkpoint.collective import (
    CheckpointError,
    Ranks,
    damaged,
    from_first,
    on_all_ranks,
    written_by_first,
)
from fzero.checkpoint.engine_state import Buffers, EngineLike
from fzero.checkpoint.folders import PathLike
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError, explain
from fzero.machine.named_shards import all_paths, leaf_paths, tied_names
from fzero.optim.counters import COUNT, UNSTEPPED, counters_of
from fzero.optim.entries import RULE, rule_entries, slots_across, slots_of
from fzero.state import TrainState
from fzero.state.entry import Entry
from fzero.state.scale import as_numbers
from fzero.state.setup import MASTERS, ParamGroups
from fzero.transforms.state_entries import VALUES, has_values, numbered, numbers_of

LATEST, ZERO, SLICES = "latest_universal", "zero", "tmp"
OPTIMIZER, STATES = "optimizer_state.pt", "_model_states.pt"
FP32, STEP = "fp32", "step"
_MAX_STEP = 2**53
_LAYOUT = "0.19.8"  # the DeepSpeed whose layout this is: its loader asks for a version
_VERSION = 0.4  # of the universal layout
Thing = TypeVar("Thing")


def save_universal(
    folder: PathLike, state: TrainState | EngineLike, *, tag: str | None = None
) -> None:
    """Write a state or an engine to folder/tag as DeepSpeed's universal checkpoint. A collective.

    For each parameter a folder: fp32.pt (its master, where it has one), what the optimizer keeps
    for it under torch.optim's names (exp_avg.pt, exp_avg_sq.pt, momentum_buffer.pt, ...), and
    step.pt, each as {"param": [shape]} in fp32; param groups with their options; of an engine the
    persistent buffers of its module, those of rank 0. `load_universal` reads it, and so does
    DeepSpeed at its stages 1 to 3, on any number of ranks, configured with
    {"checkpoint": {"load_universal": true}}.

    Parameters are gathered unit by unit, and rank 0 writes each at once: no rank holds more than
    its part and one unit. All is written into a hidden folder, which then gets its name in one
    move, and then latest_universal names it. A checkpoint of another tag stays as it is.

    Args:
        folder: where to; it is made if it is not there.
        state: one state or engine, idle: no gradient is held; with virtual ranks a stacked state.
        tag: the name of the checkpoint in `folder`, which must be new; by default
            global_step<step>_universal, numbered from the second one on.

    Raises:
        LayoutError: for an empty path, a tag that is no name or is there already, a parameter that
            cannot name a folder, or an optimizer state that the layout has no place for.
        PhaseError: for a state between gradient and update.
        DonatedError: for a used-up one.
        AxisError: when the ranks save at different steps, paths or tags.
        CheckpointError: on every rank, when the disk does not take it.

    Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py; Lian et al., "Universal Checkpointing",
    arXiv 2406.18820.

    Example:
        >>> import tempfile, torch, fzero
        >>> from fzero.checkpoint import load_universal, save_universal
        >>> opt, folder = fzero.optim.adam(1e-3), tempfile.TemporaryDirectory()
        >>> save_universal(folder.name, fzero.init({"w": torch.ones(3)}, opt, stage=3))
        >>> state = load_universal(folder.name, fzero.init({"w": torch.zeros(3)}, opt, stage=1))
        >>> fzero.full_params(state)
        {'w': tensor([1., 1., 1.])}
        >>> folder.cleanup()
    """
    wait_for_earlier(raises=False)
    held = local_states("save_universal", state)
    ranks, names = held.processes, leaf_paths(held.setup.layout)
    where = folders.shared_path(ranks, "save_universal", folder)
    first, step = held.states[0], int(held.states[0].step)
    _allocate.warn_of_left_out(first, held.ranks[0])
    assert_same_everywhere([f"tag {tag}", f"step {step}"], ranks.axis, what="the checkpoint")

    def begin(partial: Path) -> None:
        for one in held.states:
            require_idle(one)
        require_places("save_universal", first)
        good = tag is None or (isinstance(tag, str) and is_name(tag))
        if not good or (tag is not None and (where / tag).exists()):
            seen = f"is in {where} already" if good else "is no name of a folder"
            raise LayoutError(
                f"save_universal: the tag {tag!r:.80} {seen}.",
                cause="a tag that was used before, or a path.",
                fix="give a new name, or no tag: then one is made of the step.",
            )
        folders.is_there(where / LATEST)
        if ranks.axis.rank == 0:
            _write_shared(partial, first, held.buffers)

    def values() -> Iterator[tuple[str, int, Tensor]]:
        """Yield (fp32 or slot, number of the leaf, whole values), one flat at a time."""
        setup = held.setup
        kept: dict[int, dict[str, list[Tensor]]] = {}
        for name, group, flats in slots_across(held.states):
            kept.setdefault(group, {})[FP32 if name == MASTERS else name] = flats
        for index in range(len(setup.layout.groups)):
            own = kept.get(index, {})
            parts = [(key, flats, setup.optimizer_state) for key, flats in own.items()]
            if FP32 not in own:
                parts.append((FP32, [one.params.flats[index] for one in held.states], setup.params))
            for key, flats, placement in parts:
                for number, whole in whole_leaves(held, index, flats, placement):
                    yield key, number, whole

    def put(partial: Path, one: tuple[str, int, Tensor]) -> None:
        key, number, whole = one
        dtype = whole.dtype
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)
        own = torch.empty(whole.shape, dtype=dtype, device="cpu")  # and nothing else of its memory
        file = partial / ZERO / names[number] / f"{key}.pt"
        write_pickle(file, {"param": own.copy_(whole), "cat_dim": 0})

    def put_in_place(partial: Path) -> None:
        """Give the folder its name, and then say that it counts: a move each."""
        folders.sync_files((*partial.rglob("*"), partial))
        name, number = tag or f"global_step{step}_universal", 1
        while tag is None and (where / name).exists():
            number += 1
            name = f"global_step{step}_universal_{number}"
        os.rename(partial, where / name)
        folders.sync_files([where])
        folders.put_text(where / LATEST, name, through=where / f"{partial.name}-{LATEST}")
        folders.sync_files([where])

    written_by_first(ranks, where, begin=begin, values=values(), write=put, finish=put_in_place)


def _write_shared(partial: Path, state: TrainState, buffers: Buffers) -> None:
    """Write what belongs to no single parameter: the step, param groups, counters, buffers."""
    setup, layout = state.setup, state.setup.layout
    leaves, updates = layout.leaves, int(state.step)
    groups = setup.optimizer.param_groups(leaves, updates)
    counted = counters_of(state)
    steps: Any = counted.get(STEP, counted.get(COUNT, updates))
    of_group = dict.fromkeys(range(len(groups.options)), 0.0)  # the most of its parameters
    for name, number in zip(leaf_paths(layout), groups.of_leaf, strict=True):
        if number >= 0:
            own = float(steps[name] if isinstance(steps, dict) else steps)
            of_group[number] = max(of_group[number], own)
            count = torch.tensor(own, dtype=torch.float32, device="cpu")
            write_pickle(partial / ZERO / name / f"{STEP}.pt", count)
    options = [engine_state.plain_options(one) for one in groups.options]
    for number, names in enumerate(engine_state.group_names(state)):
        own = [i for i, k in enumerate(groups.of_leaf) if k == number]
        options[number] |= {"params": own, "param_names": names}
    shared: dict[str, Any] = {
        "ds_version": _LAYOUT,
        "zero_stage": state.stage,
        "partition_count": layout.ranks,
        "param_groups": options,
        # Where stage 3 of DeepSpeed looks for the step and the options.
        "optimizer_state_dict": {
            "state": {k: {"step": torch.tensor(n, device="cpu")} for k, n in of_group.items()},
            "param_groups": options,
        },
    }
    scale = as_numbers(state.scale).get("scale")
    if scale is not None:
        shared["loss_scale"] = scale
    write_pickle(partial / ZERO / OPTIMIZER, shared)
    pairs = zip(leaf_paths(layout), leaves, strict=True)
    shapes = OrderedDict((name, torch.Size(leaf.shape)) for name, leaf in pairs if leaf.trainable)
    states = {  # what DeepSpeed keeps beside the optimizer: here, buffers and counters
        "module": OrderedDict((name, x.cpu().clone()) for name, x in buffers.items()),
        "buffer_names": list(buffers),
        "param_shapes": [shapes],
        "shared_params": tied_names(layout),
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
        "skipped_steps": 0,
        "global_steps": updates,
        "dp_world_size": layout.ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _LAYOUT,
        "universal_checkpoint_info": {"universal_checkpoint_version": _VERSION},
    }
    for file in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):  # for stages 1 and 2, and for 3
        write_pickle(partial / f"{file}{STATES}", states)


# `load_universal`: files are found sound; rank 0 reads what all parameters share (step, options,
# scale, buffers); then each rank reads parameters, one at a time.


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
    where = folders.shared_path(ranks, "load_universal", folder)
    assert_same_everywhere([f"tag {tag}", f"{optimizer=}"], ranks.axis, what="the checkpoint")

    doing = f"read {where}"
    with on_all_ranks(ranks, what=doing):
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
        keys = [FP32, *([STEP, *sorted(slots)] if optimizer else [])]
    name = from_first(ranks, lambda: latest(where) if tag is None else tag, what=doing)
    source = Folder(where / name)
    with on_all_ranks(ranks, what=doing):
        names = _sound_names(source, given, keys, ranks)
    shared = from_first(
        ranks, lambda: _shared_facts(source, names, given, held.engine, optimizer), what=doing
    )

    def reads(entry: Entry) -> bool:
        return has_values(entry) or (optimizer and entry.name.startswith(RULE))

    def values(number: int, kind: str) -> Tensor:
        leaf, name = given.setup.layout.leaves[number], names[number]
        key = FP32 if kind in VALUES else kind.removeprefix(RULE)
        found = source.values(name, key, leaf.shape)
        if not _allocate.are_alike(found.dtype, leaf.dtype):
            seen = f"has {name} as {found.dtype}, {leaf.dtype} in the state"
            raise damaged(source.root / ZERO / name, seen)
        return found

    with torch.no_grad():
        with on_all_ranks(ranks, what=doing):  # of each flat of new states, this rank's own shard
            made = (_allocate.with_room(*pair, reads) for pair in held.pairs)
            states = [numbered(state, shared.counters) for state in made]
            _allocate.read_leaves(held, states, reads, values)
        _allocate.make_whole(held, states, reads)
        states = _allocate.begun_slots(held, states, f"load_universal: {where / name}")
    made = held.returned(states, shared.buffers)
    if shared.options:
        engine_state.set_options(given.setup.optimizer.param_groups((), 0).instance, shared.options)
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
    root, zero = source.root, source.root / ZERO
    if root.is_symlink() or not zero.is_dir():
        raise damaged(root, f"has no folder {ZERO}")
    paths, tied = all_paths(state.setup.layout), source.tied()
    known = {path for some in paths for path in some}
    for folder in sorted(zero.iterdir()):
        has_more = folder.is_dir() and any(file.name != f"{FP32}.pt" for file in folder.iterdir())
        if has_more and folder.name not in known:
            raise damaged(folder, "is a parameter that this state has not, with moments")
    every = ([x for path in some for x in (path, tied.get(path, path))] for some in paths)
    names = [next((x for x in some if source.holds(x)), some[0]) for some in every]
    for name in names:
        slices = (f"{part}/{name}/*/{FP32}.*" for part in (ZERO, SLICES))
        if source.file(name, FP32) is None and any(any(root.glob(some)) for some in slices):
            raise CheckpointError(
                f"{root}: {name} is there in slices of tensor-parallel ranks.",
                cause="a conversion by DeepSpeed's ds_to_universal that was cut off: it joins "
                "them last.",
                fix="let ds_to_universal convert the checkpoint again, to the end.",
            )
    held = (source.file(name, key) for name in names for key in keys)
    files = [file for file in held if file is not None]
    files += [zero / OPTIMIZER] if STEP in keys else []
    files += sorted(root.glob(f"*{STATES}"))
    for number, file in enumerate(files):
        for part in (file, *file.parents):
            if part == root:
                break
            if part.is_symlink():
                raise damaged(part, "is a link: it would be read from elsewhere")
        if not folders.is_there(file):
            raise damaged(file, "is missing")
        if number % ranks.axis.size != ranks.axis.rank:
            continue
        try:
            with zipfile.ZipFile(file) as archive:
                wrong = archive.testzip()
        except Exception as error:  # of damaged bytes: anything
            seen = f"is no file of torch.save: {type(error).__name__}: {error}"
            raise damaged(file, seen) from None
        if wrong is not None:
            seen = f"is not what was written, or has no checksums (compute_crc32=False): {wrong}"
            raise damaged(file, seen)
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
    buffers = Buffers()  # those of rank 0
    states = source.states()
    saved = states[0].get("module") if states else None
    if engine is not None and isinstance(saved, dict):
        where = source.root / f"*{STATES}"
        for name, own in engine_state.buffers_of(engine.module).items():
            if name in saved:
                values = require_dense(where, saved[name])
                if values.shape != own.shape:
                    seen = f"has {name} of {tuple(values.shape)}, {tuple(own.shape)} in the module"
                    raise damaged(where, seen)
                buffers[name] = values.clone()
    for paths, leaf in zip(all_paths(layout), layout.leaves, strict=True):
        some = [path for path in dict.fromkeys(paths) if source.holds(path)]
        _allocate.require_equal(
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
    scale = found.get("loss_scale")  # one that adapts itself; its counts begin anew
    if scale is None and found.get("dynamic_loss_scale") is True:
        inside = getattr(found.get("loss_scaler"), "state", None)
        scale = inside.get("cur_scale") if isinstance(inside, dict) else None
    if scale is not None and (type(scale) not in (int, float) or not 0 < scale < 3.5e38):
        raise damaged(file, f"has the loss scale {scale!r:.80}")
    counters = {
        "step": step,
        "optimizer": {COUNT: step, STEP: by_leaf},
        "scale": {} if scale is None else {"scale": float(scale)},
        UNSTEPPED: [name for name, taken in by_leaf.items() if not taken],
    }
    now = setup.optimizer.param_groups(layout.leaves, step)
    return SharedFacts(counters, buffers, *_options(file, found, now, state, source.tied()))


def _steps(source: Folder, names: Sequence[str], found: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return how many updates were made, and how many each parameter took.

    Raises `CheckpointError` for files that contradict each other.
    """
    taken: dict[str, Any] = {}  # by the files of parameters, where they say
    every = {f"{ZERO}/{name}/{STEP}.pt": source.file(name, STEP) for name in names}
    for place, file in every.items():
        if file is not None:
            value = read_pickle(file)
            taken[place] = as_step(file, value.get("param") if isinstance(value, dict) else value)
    if taken and len(taken) < len(every):
        silent = next(place for place in every if place not in taken)
        raise damaged(source.root / silent, f"is missing, and {next(iter(taken))} is there")
    steps: dict[str, Any] = {}
    inner = found.get("optimizer_state_dict")  # of stage 3, which has no step for a parameter
    states = inner.get("state") if isinstance(inner, dict) else None
    for number, one in states.items() if isinstance(states, dict) else ():
        if isinstance(one, dict) and STEP in one:
            place = f"{ZERO}/{OPTIMIZER}, group {number}"
            steps[place] = as_step(source.root / place, one[STEP])
    if not taken and not steps and source.states():  # of an optimizer that counts no steps
        one, where = source.states()[0], source.root / f"*{STATES}"
        made, skipped = one.get("global_steps"), one.get("skipped_steps", 0)
        steps["global_steps"] = as_step(where, as_step(where, made) - as_step(where, skipped))
    known = taken or dict([*steps.items()][:1])
    if not known:
        raise damaged(source.root, "says nowhere how many steps were made")
    for place, step in steps.items():
        if step not in known.values():
            here, own = next(iter(known.items()))
            seen = f"{own:g} by {here}, {step:g} by {place}"
            raise damaged(source.root, f"has parameters of two steps: {seen}")
    step = int(max(known.values()))
    return step, [int(taken.get(f"{ZERO}/{name}/{STEP}.pt", step)) for name in names]


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
        saved = engine_state.options_by_name(plain, theirs, state)
    if len(saved) != len(here.options):
        if here.instance is None:
            return [], [f"{len(saved)} param groups, {len(here.options)} here"]
        raise damaged(
            file, f"has {len(saved)} param groups, the optimizer here has {len(here.options)}"
        )
    made = [
        {k: x for k, x in engine_state.plain_options(some).items() if k in ours and k not in _HOW}
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
    engine_state.require_options(here.instance, made)
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


# What is in the files.


def is_name(text: str) -> bool:
    """Whether `text` can name a file or folder of its own: no path, nothing hidden."""
    return bool(text) and not text.startswith(".") and not any(c in text for c in "/\\\0\n")


def latest(folder: Path) -> str:
    """Return the name of the checkpoint in `folder` that counts. Raises `CheckpointError`."""
    try:
        tag = folders.read_text(folder / LATEST).strip()
    except CheckpointError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"there is no universal checkpoint at {folder}: {LATEST}: {error}.",
            cause="a mistyped path, the folder of one tag, or a checkpoint that was not converted.",
            fix="pass the folder that has latest_universal, or tag=; DeepSpeed's "
            "ds_to_universal converts its own checkpoints.",
        ) from None
    if not is_name(tag):
        raise damaged(folder / LATEST, f"names {tag!r:.80}, which is no folder beside it")
    return tag


def require_places(caller: str, state: TrainState) -> None:
    """Raise `LayoutError` for parameters, or an optimizer state, that the layout cannot have."""
    names = leaf_paths(state.setup.layout)
    wrong = [f"parameter {name!r}" for name in names if not is_name(name)]
    slots = {slot.name: slot.name.isidentifier() for slot in slots_of(state)}
    kept = slots | {name: name in (STEP, COUNT) for name in counters_of(state)}
    wrong += [f"optimizer's {name}" for name, fits in kept.items() if not fits]
    wrong += [
        f"optimizer's {one.name.removeprefix(RULE)}, which the owner keeps"
        for one in rule_entries(state, 0)
        if one.form.leaves == "named" and one.values
    ]
    if wrong:
        raise LayoutError(
            f"{caller}: DeepSpeed's layout has no place for the {wrong[-1]}.",
            cause="an optimizer that counts more than steps, has no names for what it keeps, or "
            "needs whole matrices; or a parameter whose name is no name of a folder.",
            fix="use fzero.checkpoint.save and load, which take any state; or Adam, AdamW, SGD "
            "or Lion.",
        )


class Folder:
    """One universal checkpoint, of files that were found sound.

    A tensor is read when it is asked for; model states are kept, with tensors that lie in files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._states: dict[str, list[Mapping[str, Any]]] = {}

    def holds(self, name: str) -> bool:
        """Whether there is a folder of the parameter `name`, which may be no name of one."""
        return is_name(name) and any((self.root / part / name).is_dir() for part in (ZERO, SLICES))

    def tied(self) -> dict[str, str]:
        """Return {another name of a parameter: its name here}, as the model states have them."""
        found = self.states()[0].get("shared_params") if self.states() else None
        pairs = found.items() if isinstance(found, dict) else ()
        return {x: name for x, name in pairs if isinstance(x, str) and isinstance(name, str)}

    def file(self, name: str, key: str) -> Path | None:
        """Return the file that has `key` of a parameter, if there is one."""
        file = self.root / ZERO / name / f"{key}.pt"
        there = file.is_symlink() or file.exists()  # whatever it is: who reads it looks at it
        return file if there else None

    def values(self, name: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """Return `key` of a parameter, whole and flat; of a file, only what is used is read.

        Raises `CheckpointError`, naming file and parameter, for another shape, and for none.
        """
        file = self.root / ZERO / name / f"{key}.pt"
        if self.file(name, key) is not None:
            return _fitted(file, read_pickle(file), shape)
        found = self._frozen(name) if key == FP32 else None
        if found is None:
            raise damaged(file, "is missing")
        return _fitted(file, found, shape)

    def states(self) -> list[Mapping[str, Any]]:
        """Return what the model states of rank 0 hold, one for each of its files."""
        # At stages 1 and 2 one file has them, at stage 3 each rank a file of its own.
        return self._read("mp_rank_*") or self._read("zero_pp_rank_0_mp_rank_*")

    def _read(self, files: str) -> list[Mapping[str, Any]]:
        if files not in self._states:
            found = sorted(  # rank 10 comes after rank 9
                self.root.glob(f"{files}{STATES}"),
                key=lambda file: [int(number) for number in re.findall("[0-9]+", file.name)],
            )
            self._states[files] = [dict_in(file) for file in found]
        return self._states[files]

    def _frozen(self, name: str) -> Tensor | None:
        """Return a frozen parameter, of which stage 3 keeps a part in each rank's model states."""
        states = self._read("zero_pp_rank_*_mp_rank_00")
        parts = [(one.get("frozen_param_fragments") or {}).get(name) for one in states]
        if not parts or any(part is None for part in parts):
            return None
        numel = prod(states[0]["frozen_param_shapes"][name])
        where = self.root / f"zero_pp_rank_*_mp_rank_00{STATES}"
        return torch.cat([require_dense(where, part).reshape(-1) for part in parts])[:numel]


def as_step(where: object, value: Any) -> Any:
    """Return a number of updates. Raises `CheckpointError` for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    whole = type(value) in (int, float) and 0 <= value < _MAX_STEP and value == int(value)
    if not whole:
        raise damaged(where, f"has the step {value!r:.80}, which is no number of updates")
    return value


def _fitted(where: Path, found: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the values [numel] of a parameter of this shape; a vocabulary grows by zeros."""
    about = found if isinstance(found, dict) else {"param": found}
    if "param" not in about:
        raise damaged(where, f"has no 'param', but {sorted(map(str, about))[:6]}")
    values = require_dense(where, about["param"])
    here, grows = tuple(values.shape), about.get("vocab_tensor") is True
    alone = len(here) == 1 and about is not found  # as stage 3 has it: without its shape
    if here == shape or ((alone or "sub_param_shape" in about) and values.numel() == prod(shape)):
        return values.reshape(-1)
    if grows and shape and here[1:] == shape[1:] and here[0] <= shape[0]:
        rows = values.new_zeros(shape[0] - here[0], *shape[1:])
        return torch.cat([values, rows]).reshape(-1)
    raise damaged(where, f"has a parameter of {here}, which is {shape} in the state")


def dict_in(file: Path) -> Mapping[str, Any]:
    """Return the dict that a file holds. Raises `CheckpointError` if it holds something else."""
    found = read_pickle(file)
    if not isinstance(found, dict):
        raise damaged(file, f"holds no dict, but a {type(found).__name__}")
    return found


_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_KEPT = (
    f"{_SCALER}.LossScaler",
    f"{_SCALER}.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "argparse.Namespace",  # the options of Megatron
)


class ForeignObject:
    """A stand-in for an unpickled object of another program: its class name and arguments."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_pickle(file: Path) -> Any:
    """Return what a file of torch.save holds; bytes of its tensors are read when they are used.

    Raises `CheckpointError`, naming what it is, for a file that names anything but tensors and
    containers, and for one that torch.load cannot read.
    """
    try:
        with torch.serialization.safe_globals([(ForeignObject, name) for name in _KEPT]):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        seen = f"cannot be read: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        with suppress(Exception):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            if odd := sorted({*names} - {*_KEPT}):
                seen = (
                    f"names {', '.join(odd[:4])}: nothing but tensors, numbers, strings and "
                    "containers is read from a pickle"
                )
        raise damaged(file, seen) from None


def write_pickle(file: Path, value: Any) -> None:
    """Write a new file. Who gives it its place has its bytes on the disk before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as stream:  # whose error says why; torch's own does not
        torch.save(value, stream)


def require_dense(file: Path, value: Any) -> Tensor:
    """Return a dense tensor in memory. Raises `CheckpointError` for anything else."""
    dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    if not dense or value.device.type != "cpu" or value.is_quantized:
        raise damaged(file, f"holds no plain tensor, but a {type(value).__name__}")
    return value.detach()
