"""Whole parameters for others: safetensors files, and the `state_dict` of a plain module."""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from fzero.checkpoint._process_states import Held, held_by, whole_leaves
from fzero.checkpoint._safetensors import (
    INDEX,
    SINGLE,
    Place,
    TensorForm,
    begin_file,
    places_in,
    split_files,
    write_values,
)
from fzero.checkpoint._save import wait_for_earlier
from fzero.checkpoint.collective import CheckpointError, written_by_first
from fzero.checkpoint.engine_state import Driven, buffers_of
from fzero.checkpoint.folders import (
    PathLike,
    is_there,
    locked,
    path_everywhere,
    put_text,
    sync,
    sync_files,
)
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError, explain
from fzero.machine.named_shards import all_paths, leaf_paths, tied_names
from fzero.state import TrainState

_OWN = re.compile(r"model(-[0-9a-f]{8})?-[0-9]{5}-of-[0-9]{5}\.safetensors")
"""The names that an export gives."""


def export_safetensors(
    folder: PathLike, state: TrainState | Driven, *, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write all parameters to model-0000i-of-0000N.safetensors, as Hugging Face reads them.

    A collective. Names are the paths of the parameters, a tied one once, under its first path,
    with the others in the header; of an engine also the persistent buffers of its module, those of
    rank 0.
    `model.safetensors.index.json` says which file has what. Parameters are gathered unit by unit,
    and rank 0 writes each at once: no rank holds more than its part and one unit.

    An earlier export in the folder counts until the new index is put in its place, in one move; its
    files are removed then, unless somebody imports just now. So the new files have other names
    where these are taken: model-<8 hex digits>-0000i-of-0000N.safetensors. Other files stay.

    Args:
        folder: where to; it is made if it is not there. Give it a config.json for from_pretrained.
        state: a state, or an engine.
        max_shard_bytes: of the tensors in one file; a larger tensor has a file of its own.

    Raises:
        LayoutError: for an empty path, a bound below 1, or a dtype that the format has not.
        DonatedError: for a used-up state.
        CheckpointError: on every rank, when the disk does not take it.

    Source: Hugging Face, safetensors, and "Big models" of transformers, for the index.

    Example:
        >>> import tempfile, torch, fzero
        >>> state = fzero.init({"w": torch.ones(2, 2)}, fzero.optim.sgd(0.1), stage=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fzero.checkpoint.export_safetensors(folder, state)
        ...     made = fzero.checkpoint.safetensors_initializer(folder)("w", torch.empty(2, 2))
        >>> made
        tensor([[1., 1.],
                [1., 1.]])
    """
    wait_for_earlier(raises=False)
    held = held_by("export_safetensors", state)
    ranks, layout, buffers = held.processes, held.setup.layout, held.buffers
    where = path_everywhere(ranks, "export_safetensors", folder)
    facts = [f"path {where}", f"step {int(held.states[0].step)}", f"{max_shard_bytes} bytes"]
    assert_same_everywhere(facts, ranks.axis, what="the export")
    names = leaf_paths(layout)
    forms = {
        name: TensorForm(leaf.shape, leaf.dtype)
        for name, leaf in zip(names, layout.leaves, strict=True)
    }
    forms |= {name: TensorForm(tuple(x.shape), x.dtype) for name, x in buffers.items()}

    places: dict[str, Place] = {}
    until_written = ExitStack()

    def begin(partial: Path) -> None:
        _require_bound(max_shard_bytes)
        if ranks.axis.rank == 0:
            where.mkdir(parents=True, exist_ok=True)
            until_written.enter_context(locked(where, alone=False, file=""))
            is_there(where / INDEX)
            for old in where.iterdir():
                if _OWN.fullmatch(old.name):
                    is_there(old)
            _warn_of_single(where)
            places.update(_begun(partial, forms, max_shard_bytes, tied_names(layout)))

    def values() -> Iterator[tuple[str, Tensor]]:
        for number, value in whole_parameters(held):
            yield names[number], value
        yield from buffers.items()

    with until_written:
        written_by_first(
            ranks,
            where,
            begin=begin,
            values=values(),
            write=lambda _, named: write_values(places[named[0]], named[1]),
            finish=lambda partial: _put_in_place(partial, where, places),
        )
    if ranks.axis.rank == 0:
        _remove_others(where)


def state_dict(state: TrainState | Driven, module: nn.Module | None = None) -> dict[str, Tensor]:
    """Return {name: whole values}, on the CPU, which `module.load_state_dict` takes. A collective.

    Each unit is gathered, copied to the CPU, and let go. The names are those of
    `module.state_dict()`: a tied parameter at each of its names, and the module's buffers. Without
    a module, which an engine has itself, they are the paths of the state's parameters.

    Args:
        state: a state, or an engine.
        module: the module that the state's parameters came from (`fzero.functionalize`), on any
            device: its names are used, and its buffers.

    Returns:
        Tensors that nobody else has, on every rank.

    Raises:
        LayoutError: for a module with a parameter that the state has not.
        DonatedError: for a used-up state.

    Example:
        >>> import torch, fzero
        >>> module = torch.nn.BatchNorm1d(2)
        >>> apply, params, buffers = fzero.functionalize(module, buffers=True)
        >>> state = fzero.init(params, fzero.optim.sgd(0.1), stage=3)
        >>> module.load_state_dict(fzero.checkpoint.state_dict(state, module))
        <All keys matched successfully>
    """
    held = held_by("state_dict", state)
    facts = [f"step {int(held.states[0].step)}"]
    assert_same_everywhere(facts, held.processes.axis, what="state_dict")
    by_path = values_by_path(held)
    of = module if held.engine is None else held.engine.module
    if of is None:
        return by_path
    result = {}
    first: dict[int, str] = {}
    for name, parameter in of.named_parameters(remove_duplicate=False):
        path = first.setdefault(id(parameter), name)
        value = by_path.get(name, by_path.get(path))
        if value is None:
            raise LayoutError(
                f"state_dict: the state has no parameter {name}; it has {[*by_path][:6]} ...",
                cause="another module than the one that the state was made of.",
                fix="pass the module that was given to functionalize, or none.",
            )
        result[name] = value
    return result | {name: x.cpu().clone() for name, x in buffers_of(of).items()}


def values_by_path(held: Held, paths: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return {path: whole values} on the CPU, a tied leaf at each of its paths. A collective.

    paths: of the leaves that are wanted; by default all of them.
    """
    of_leaves, found = all_paths(held.setup.layout), dict[str, Tensor]()
    wanted = {i for i, some in enumerate(of_leaves) if paths is None or {*some} & {*paths}}
    for number, values in whole_parameters(held, wanted):
        copied = torch.empty_like(values, device="cpu").copy_(values)
        found.update(dict.fromkeys(of_leaves[number], copied))
    return found


def whole_parameters(held: Held, wanted: Set[int] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the leaf, whole values), gathered group by group. A collective.

    wanted: the leaves; by default all of them. Groups without any are not gathered.
    """
    for index, group in enumerate(held.setup.layout.groups):
        if wanted is not None and wanted.isdisjoint(group.leaves):
            continue
        flats = [one.params.flats[index] for one in held.states]
        for number, values in whole_leaves(held, index, flats, held.setup.params):
            if wanted is None or number in wanted:
                yield number, values


def _begun(
    partial: Path, forms: Mapping[str, TensorForm], max_bytes: int, tied: Mapping[str, str]
) -> dict[str, Place]:
    partial.mkdir(parents=True)
    shards = split_files(forms, max_bytes)
    places: dict[str, Place] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= begin_file(partial / file, {name: forms[name] for name in names}, tied)
    return {name: places[name] for name in forms}


def _put_in_place(partial: Path, folder: Path, places: Mapping[str, Place]) -> None:
    """Give the files names that nothing has, and then let the index name them."""
    new = sorted(partial.iterdir())
    sync_files(new)
    names = _free_names(folder, [file.name for file in new])
    for file in new:
        os.replace(file, folder / names[file.name])
    sync(folder)
    index = {
        "metadata": {"total_size": sum(place.form.nbytes for place in places.values())},
        "weight_map": {name: names[place.file.name] for name, place in places.items()},
    }
    put_text(folder / INDEX, json.dumps(index, indent=2), through=partial / INDEX)
    sync(folder)


def _free_names(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the names to give files, each taken by an empty file: two exports never have one."""
    taken: list[Path] = []
    try:
        for name in names:
            (folder / name).open("xb").close()
            taken.append(folder / name)
        return {name: name for name in names}
    except FileExistsError:
        for file in taken:
            file.unlink()
    mark = secrets.token_hex(4)
    return {name: name.replace("model-", f"model-{mark}-", 1) for name in names}


def _remove_others(folder: Path) -> None:
    """Remove the files of earlier exports, if nobody exports or imports; what cannot be, stays."""
    with locked(folder, alone=True, file="") as alone, suppress(OSError, CheckpointError):
        named = {place.file for place in places_in(folder).values()} if alone else set[Path]()
        for old in folder.iterdir() if alone else ():
            if _OWN.fullmatch(old.name) and old not in named:
                old.unlink()


def _warn_of_single(folder: Path) -> None:
    if is_there(folder / SINGLE):
        text = explain(
            f"export_safetensors: there is a {SINGLE} in {folder}, which stays.",
            cause="a folder of save_pretrained with one file.",
            fix=f"remove {SINGLE}: from_pretrained of transformers reads it, and not the export. "
            "Or give another folder.",
        )
        warnings.warn(text, UserWarning, stacklevel=2)


def _require_bound(max_shard_bytes: int) -> None:
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise LayoutError(
            f"export_safetensors: max_shard_bytes={max_shard_bytes!r}.",
            cause='a size as text ("5GB"), or zero.',
            fix="give a number of bytes, at least 1.",
        )
