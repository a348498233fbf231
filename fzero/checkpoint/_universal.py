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
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fzero.checkpoint._allocate import warn_of_left_out
from fzero.checkpoint._process_states import LocalStates, local_states, require_idle, whole_leaves
from fzero.checkpoint._save import wait_for_earlier
from fzero.checkpoint.collective import CheckpointError, damaged, written_by_first
from fzero.checkpoint.engine_state import Buffers, EngineLike, group_names, plain_options
from fzero.checkpoint.folders import (
    PathLike,
    is_there,
    path_everywhere,
    put_text,
    read_text,
    sync,
    sync_files,
)
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.machine.named_shards import leaf_paths, tied_names
from fzero.optim.counters import COUNT, counters_of
from fzero.optim.entries import RULE, rule_entries, slots_across, slots_of
from fzero.state import TrainState
from fzero.state.scale import as_numbers
from fzero.state.setup import MASTERS

LATEST, ZERO, SLICES = "latest_universal", "zero", "tmp"
OPTIMIZER, STATES = "optimizer_state.pt", "_model_states.pt"
FP32, STEP = "fp32", "step"
_MAX_STEP = 2**53


def is_name(text: str) -> bool:
    """Whether `text` can name a file or folder of its own: no path, nothing hidden."""
    return bool(text) and not text.startswith(".") and not any(c in text for c in "/\\\0\n")


def latest(folder: Path) -> str:
    """Return the name of the checkpoint in `folder` that counts. Raises `CheckpointError`."""
    try:
        tag = read_text(folder / LATEST).strip()
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

    def require_there(self) -> None:
        """Raise `CheckpointError` unless it is a folder with parameters, and no link."""
        if self.root.is_symlink() or not (self.root / ZERO).is_dir():
            raise damaged(self.root, f"has no folder {ZERO}")

    def require_joined(self, name: str) -> None:
        """Raise `CheckpointError` for a parameter in slices, which only the converter can join."""
        slices = (f"{part}/{name}/*/{FP32}.*" for part in (ZERO, SLICES))
        if self.file(name, FP32) is None and any(any(self.root.glob(some)) for some in slices):
            raise CheckpointError(
                f"{self.root}: {name} is there in slices of tensor-parallel ranks.",
                cause="a conversion by DeepSpeed's ds_to_universal that was cut off: it joins "
                "them last.",
                fix="let ds_to_universal convert the checkpoint again, to the end.",
            )

    def holds(self, name: str) -> bool:
        """Whether there is a folder of the parameter `name`, which may be no name of one."""
        return is_name(name) and any((self.root / part / name).is_dir() for part in (ZERO, SLICES))

    def tied(self) -> dict[str, str]:
        """Return {another name of a parameter: its name here}, as the model states have them."""
        found = self.states()[0].get("shared_params") if self.states() else None
        pairs = found.items() if isinstance(found, dict) else ()
        return {x: name for x, name in pairs if isinstance(x, str) and isinstance(name, str)}

    def names(self) -> list[str]:
        """Return every parameter of which there is more than values."""
        found = []
        for folder in sorted((self.root / ZERO).iterdir()):
            if folder.is_dir() and any(file.name != f"{FP32}.pt" for file in folder.iterdir()):
                found.append(folder.name)
        return found

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

    def step(self, name: str) -> float | None:
        """Return how often a parameter was updated, by its files; None if they do not say."""
        if (file := self.file(name, STEP)) is None:
            return None
        value = read_pickle(file)
        return as_step(file, value.get("param") if isinstance(value, dict) else value)

    def states(self) -> list[Mapping[str, Any]]:
        """Return what the model states of rank 0 hold, one for each of its files."""
        # At stages 1 and 2 one file has them, at stage 3 each rank a file of its own.
        return self._read("mp_rank_*") or self._read("zero_pp_rank_0_mp_rank_*")

    def _read(self, files: str) -> list[Mapping[str, Any]]:
        if files not in self._states:
            found = sorted(self.root.glob(f"{files}{STATES}"), key=_numbers)
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


def _numbers(file: Path) -> list[int]:
    """Return the ranks in a name: rank 10 comes after rank 9."""
    return [int(number) for number in re.findall(r"[0-9]+", file.name)]


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


def require_own(file: Path, root: Path) -> None:
    """Raise `CheckpointError` unless it is a file inside of `root`, by no link."""
    for part in (file, *file.parents):
        if part == root:
            break
        if part.is_symlink():
            raise damaged(part, "is a link: it would be read from elsewhere")
    if not is_there(file):
        raise damaged(file, "is missing")


def require_sound(file: Path) -> None:
    """Raise `CheckpointError` for a file that was cut off, or whose bytes are others."""
    try:
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
    except Exception as error:  # of damaged bytes: anything
        raise damaged(file, f"is no file of torch.save: {type(error).__name__}: {error}") from None
    if wrong is not None:
        raise damaged(
            file, f"is not what was written, or has no checksums (compute_crc32=False): {wrong}"
        )


def read_pickle(file: Path) -> Any:
    """Return what a file of torch.save holds; bytes of its tensors are read when they are used.

    Raises `CheckpointError`, naming what it is, for a file that names anything but tensors and
    containers, and for one that torch.load cannot read.
    """
    try:
        with torch.serialization.safe_globals([(ForeignObject, name) for name in _KEPT]):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise damaged(file, _seen(file, error)) from None


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


def _seen(file: Path, error: Exception) -> str:
    """Say why a file was not read: which names it has that are not taken, if it has."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:
        names = []
    odd = sorted({*names} - {*_KEPT})
    if odd:
        return (
            f"names {', '.join(odd[:4])}: nothing but tensors, numbers, strings and containers "
            "is read from a pickle"
        )
    return f"cannot be read: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


# `save_universal`: a train state, or an engine, as DeepSpeed's universal checkpoint.

_LAYOUT = "0.19.8"  # the DeepSpeed whose layout this is: its loader asks for a version
_VERSION = 0.4  # of the universal layout


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
    where = path_everywhere(ranks, "save_universal", folder)
    first, step = held.states[0], int(held.states[0].step)
    warn_of_left_out(first, held.ranks[0])
    facts = [f"path {where}", f"tag {tag}", f"step {step}"]
    assert_same_everywhere(facts, ranks.axis, what="the checkpoint")

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
        is_there(where / LATEST)
        if ranks.axis.rank == 0:
            _write_shared(partial, first, held.buffers)

    def put(partial: Path, one: tuple[str, int, Tensor]) -> None:
        key, number, values = one
        dtype = values.dtype
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)
        own = torch.empty(values.shape, dtype=dtype, device="cpu")  # and nothing else of its memory
        file = partial / ZERO / names[number] / f"{key}.pt"
        write_pickle(file, {"param": own.copy_(values), "cat_dim": 0})

    def put_in_place(partial: Path) -> None:
        """Give the folder its name, and then say that it counts: a move each."""
        sync_files((*partial.rglob("*"), partial))
        name, number = tag or f"global_step{step}_universal", 1
        while tag is None and (where / name).exists():
            number += 1
            name = f"global_step{step}_universal_{number}"
        os.rename(partial, where / name)
        sync(where)
        put_text(where / LATEST, name, through=where / f"{partial.name}-{LATEST}")
        sync(where)

    written_by_first(
        ranks, where, begin=begin, values=_whole_values(held), write=put, finish=put_in_place
    )


def _whole_values(held: LocalStates) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (fp32 or slot, number of the leaf, whole values), one flat at a time. A collective."""
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
            for number, values in whole_leaves(held, index, flats, placement):
                yield key, number, values


def _write_shared(partial: Path, state: TrainState, buffers: Buffers) -> None:
    """Write what belongs to no single parameter: the step, param groups, counters, buffers."""
    setup, layout = state.setup, state.setup.layout
    leaves, updates = layout.leaves, int(state.step)
    groups = setup.optimizer.param_groups(leaves, updates)
    counted = counters_of(state)
    steps: Any = counted.get(STEP, counted.get(COUNT, updates))
    numbers = range(len(groups.options))
    of_group = dict.fromkeys(numbers, 0.0)  # the most that one of its parameters took
    for name, number in zip(leaf_paths(layout), groups.of_leaf, strict=True):
        if number >= 0:
            own = float(steps[name] if isinstance(steps, dict) else steps)
            of_group[number] = max(of_group[number], own)
            count = torch.tensor(own, dtype=torch.float32, device="cpu")
            write_pickle(partial / ZERO / name / f"{STEP}.pt", count)
    options = [
        {
            **plain_options(one),
            "params": [i for i, k in enumerate(groups.of_leaf) if k == number],
            "param_names": names,
        }
        for number, one, names in zip(numbers, groups.options, group_names(state), strict=True)
    ]
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
