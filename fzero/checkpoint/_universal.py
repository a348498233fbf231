"""DeepSpeed's universal checkpoint: which file has what, read one parameter at a time.

    folder/latest_universal              the name of the checkpoint that counts
    folder/<tag>/zero/<parameter>/       fp32.pt: the values; exp_avg.pt, exp_avg_sq.pt, ...: what
                                         the optimizer keeps; each {"param": [shape], ...} or, from
                                         stage 3, [numel]; step.pt: a number
    folder/<tag>/zero/optimizer_state.pt param groups, and more that all parameters share
    folder/<tag>/*model_states.pt        buffers, counters, and how tensor-parallel ranks cut

A parameter may lie there in slices, one for each tensor-parallel rank, each in parts of the
data-parallel ranks: as the converter has them, in its folder `tmp`, before it joins them.

    folder/<tag>/zero/<parameter>/<tensor-parallel rank>/fp32.<data-parallel rank>, ...
    folder/<tag>/tmp/<parameter>/<tensor-parallel rank>/fp32.<data-parallel rank>, ...

Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py and checkpoint/universal_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._pickles import read_pickle, require_dense
from fzero.checkpoint._tensor_slices import whole_parameter
from fzero.checkpoint.disk import read_text
from fzero.checkpoint.everywhere import CheckpointError, damaged
from fzero.errors import LayoutError
from fzero.machine.by_path import leaf_paths
from fzero.optim.counters import COUNT, counters_of
from fzero.optim.entries import RULE, rule_entries, slots_of
from fzero.state import TrainState

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

    def holds(self, name: str) -> bool:
        """Whether there is a folder of the parameter `name`."""
        return any((self.root / part / name).is_dir() for part in (ZERO, SLICES))

    def names(self) -> list[str]:
        """Return every parameter of which there is more than values."""
        found = []
        for folder in sorted((self.root / ZERO).iterdir()):
            if folder.is_dir() and any(file.name != f"{FP32}.pt" for file in folder.iterdir()):
                found.append(folder.name)
        return found

    def files(self, name: str, key: str) -> list[Path]:
        """Return the files that have `key` of a parameter: one, or those of its slices."""
        whole = self.root / ZERO / name / f"{key}.pt"
        if whole.is_symlink() or whole.exists():  # whatever it is: who reads it looks at it
            return [whole]
        for part in (ZERO, SLICES):
            if found := sorted((self.root / part / name).glob(f"*/{key}.*"), key=_place):
                return found
        return []

    def values(self, name: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """Return `key` of a parameter, whole and flat; of a file, only what is used is read.

        Raises `CheckpointError`, naming file and parameter, for another shape, and for none.
        """
        whole, files = self.root / ZERO / name / f"{key}.pt", self.files(name, key)
        if files == [whole]:
            return _fitted(whole, read_pickle(whole), shape)
        if files:
            return _fitted(files[0].parents[1], self._joined(files[0].parents[1], files), shape)
        found = self._frozen(name) if key == FP32 else None
        if found is None:
            raise damaged(whole, "is missing")
        return _fitted(whole, found, shape)

    def step(self, name: str) -> float | None:
        """Return how often a parameter was updated, by its files; None if they do not say."""
        found: dict[float, Path] = {}
        for file in self.files(name, STEP):
            value = read_pickle(file)
            value = value.get("param") if isinstance(value, dict) else value
            found[as_step(file, value)] = file
        if len(found) > 1:
            (one, file), (two, other) = list(found.items())[:2]
            raise damaged(file, f"has step {one:g}, {other.name} beside it has {two:g}")
        return next(iter(found), None)

    def states(self) -> list[Mapping[str, Any]]:
        """Return what the model states of rank 0 hold, for each tensor-parallel rank; none: []."""
        # At stages 1 and 2 one file has them, at stage 3 each rank a file of its own.
        return self._read("mp_rank_*") or self._read("zero_pp_rank_0_mp_rank_*")

    def _read(self, files: str) -> list[Mapping[str, Any]]:
        if files not in self._states:
            found = sorted(self.root.glob(f"{files}{STATES}"), key=_numbers)
            self._states[files] = [dict_in(file) for file in found]
        return self._states[files]

    def _joined(self, where: Path, files: list[Path]) -> Any:
        """Return a parameter of which there are slices, in folders of `where`."""
        states, name = self.states(), where.name
        given = states[0].get("checkpoint_parallel_dimensions", {}) if states else {}
        ranks: dict[int, list[Path]] = {}
        for file in files:
            ranks.setdefault(_place(file)[0], []).append(file)
        size = given.get("tp_degree", len(states) or len(ranks))
        if sorted(ranks) != list(range(size)):
            seen = f"has slices of the tensor-parallel ranks {sorted(ranks)}, {size} were saved"
            raise damaged(where, seen)
        try:
            slices = [self._slice(name, rank, size, some) for rank, some in sorted(ranks.items())]
            info = states[0].get("universal_checkpoint_info") if states else None
            return whole_parameter(name, slices, info or {})
        except CheckpointError:
            raise
        except Exception as error:  # of what the files say: anything can be wrong with it
            raise damaged(where, f"cannot be joined: {error}") from None

    def _slice(self, name: str, rank: int, size: int, files: list[Path]) -> Tensor:
        parts = [require_dense(file, read_pickle(file)) for file in files]
        for state in self.states()[rank::size]:  # of each pipeline stage, one after another
            shapes = state.get("param_shapes", ())
            for some in shapes if isinstance(shapes, list | tuple) else (shapes,):
                if name in some:
                    return torch.cat([part.reshape(-1) for part in parts]).reshape(some[name])
        if len(parts) > 1:
            raise ValueError(f"no model states say the shape of rank {rank}'s slice")
        return parts[0]

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


def _place(file: Path) -> tuple[int, int]:
    """Return the tensor-parallel rank and the data-parallel one of a slice's file."""
    rank, part = file.parent.name, file.suffix[1:]
    if not (rank.isdecimal() and (part.isdecimal() or part == "pt")):
        raise damaged(file, "is no slice of a parameter: its name has no ranks")
    return int(rank), int(part) if part.isdecimal() else 0


def _numbers(file: Path) -> list[int]:
    """Return the ranks in a name: rank 10 comes after rank 9."""
    return [int(number) for number in re.findall(r"[0-9]+", file.name)]


def dict_in(file: Path) -> Mapping[str, Any]:
    """Return the dict that a file holds. Raises `CheckpointError` if it holds something else."""
    found = read_pickle(file)
    if not isinstance(found, dict):
        raise damaged(file, f"holds no dict, but a {type(found).__name__}")
    return found
